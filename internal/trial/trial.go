// Package trial tries limits out in memory, on calls with instants of their own: those of a log, or
// those that a model of load makes. It counts the calls that would have been granted and refused,
// and draws it.
package trial

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// A Trial is a limit in memory, with the outcomes of its calls.
type Trial struct {
	Tally

	limit   ratelimit.Limit
	reserve bool
	now     time.Time
	store   *memstore.Store
	keys    map[string]*keyState
	watch   *Watch
}

// A Tally is the outcomes of calls.
type Tally struct {
	Limit   ratelimit.Definition `json:"definition"`
	Calls   int                  `json:"calls"`
	Granted int                  `json:"granted"`
	Refused int                  `json:"refused"`
	Never   int                  `json:"never"`  // of the refused, those that the limit can never grant
	Tokens  float64              `json:"tokens"` // that were granted
	Keys    int                  `json:"keys"`

	LongestWait    time.Duration `json:"-"` // that a call was told: by a refusal, or of a reservation
	LongestWaitKey string        `json:"longestWaitKey,omitempty"`

	// Peak is the most tokens that a key was granted within a stretch as long as the period,
	// wherever it begins: at a window's edge it can be twice the rate.
	Peak float64 `json:"peak"`
}

// RefusedShare returns the share of the calls that were refused.
func (t *Tally) RefusedShare() float64 {
	if t.Calls == 0 {
		return 0
	}
	return float64(t.Refused) / float64(t.Calls)
}

// A KeyTally is the outcomes of a key's calls.
type KeyTally struct {
	Key     string `json:"key"`
	Calls   int    `json:"calls"`
	Refused int    `json:"refused"`
}

// keyState is the counts of a key.
type keyState struct {
	KeyTally
	grants []grant // within the last period, the oldest first
	first  int     // of them that counts
	recent float64 // the sum of those
}

type grant struct {
	at    time.Time
	count float64
}

// New makes a trial of a limit, by reservations or by allows. The error is
// [ratelimit.ErrInvalid].
func New(limit ratelimit.Limit, reserve bool) (*Trial, error) {
	if err := ratelimit.Validate(limit); err != nil {
		return nil, err
	}
	t := &Trial{limit: limit, reserve: reserve, keys: map[string]*keyState{}}
	t.Limit = limit.Definition()
	t.store = memstore.New(func() time.Time { return t.now })
	return t, nil
}

// Call asks for a count at an instant. Calls should be in the order of their instants: the
// limit's clock does not go back. A count that can never be granted is a refusal without an
// instant, and Never. Errors are [ratelimit.ErrInvalid].
func (t *Trial) Call(at time.Time, key string, count float64) (ratelimit.Status, error) {
	t.advance(at)
	ask := t.store.Allow
	if t.reserve {
		ask = t.store.Reserve
	}
	result, err := ask(context.Background(), t.limit.ForN(key, count))
	never := errors.Is(err, ratelimit.ErrExceedsCapacity)
	if err != nil && !never {
		return ratelimit.Status{}, err
	}
	t.count(t.key(key), count, &result.Status, never)
	if t.watch != nil {
		t.watch.saw(t, key, &result.Status, never)
	}
	return result.Status, nil
}

// Pause pauses a key at an instant.
func (t *Trial) Pause(at time.Time, key string, lasts time.Duration) error {
	t.advance(at)
	until, err := t.store.Pause(context.Background(), t.limit, key, lasts)
	if err == nil && t.watch != nil && key == t.watch.Key {
		t.watch.pauses = append(t.watch.pauses, [2]time.Time{t.now, until})
	}
	return err
}

// advance moves the clock, and has the watch look at the tokens refilled meanwhile.
func (t *Trial) advance(at time.Time) {
	if t.watch != nil {
		t.watch.look(t, at)
	}
	if at.After(t.now) {
		t.now = at
	}
}

func (t *Trial) key(key string) *keyState {
	k := t.keys[key]
	if k == nil {
		k = &keyState{KeyTally: KeyTally{Key: key}}
		t.keys[key] = k
		t.Keys++
	}
	return k
}

func (t *Trial) count(k *keyState, count float64, s *ratelimit.Status, never bool) {
	t.Calls++
	k.Calls++
	if s.RetryAfter > t.LongestWait {
		t.LongestWait, t.LongestWaitKey = s.RetryAfter, k.Key
	}
	if !s.OK {
		t.Refused++
		k.Refused++
		if never {
			t.Never++
		}
		return
	}
	t.Granted++
	t.Tokens += count
	k.granted(grant{s.RetryAt, count}, t.Limit.Period)
	t.Peak = max(t.Peak, k.recent)
}

// granted counts a grant among those of the last period. A reservation counts when it is due.
func (k *keyState) granted(g grant, period time.Duration) {
	k.grants = append(k.grants, g)
	k.recent += g.count
	for ; g.at.Sub(k.grants[k.first].at) >= period; k.first++ {
		k.recent -= k.grants[k.first].count
	}
	if k.first > len(k.grants)/2 && k.first > 16 {
		k.grants = append(k.grants[:0], k.grants[k.first:]...)
		k.first = 0
	}
}

// Most returns the keys that were refused most often, or else called most often; at most that
// number of them.
func (t *Trial) Most(n int) []KeyTally {
	all := make([]KeyTally, 0, len(t.keys))
	for _, k := range t.keys {
		all = append(all, k.KeyTally)
	}
	slices.SortFunc(all, func(a, b KeyTally) int {
		return cmp.Or(cmp.Compare(b.Refused, a.Refused), cmp.Compare(b.Calls, a.Calls), cmp.Compare(a.Key, b.Key))
	})
	return all[:min(n, len(all))]
}

// A Call is a call as a log has it.
type Call struct {
	At    time.Time
	Key   string
	Count float64

	File, Line int32 // where it stands
}

// A CallError is a call that a limit cannot make sense of.
type CallError struct {
	Call Call
	Err  error
}

func (e *CallError) Error() string { return e.Err.Error() }
func (e *CallError) Unwrap() error { return e.Err }

// Replay makes calls, in the order of their instants, and returns their outcomes. An error is
// a *[CallError], or that of [New] or ctx. Progress,
// which may be nil, hears now and then how many were made.
func Replay(ctx context.Context, limit ratelimit.Limit, calls []Call, reserve bool, watch *Watch, progress func(done int)) (*Trial, error) {
	t, err := New(limit, reserve)
	if err != nil {
		return nil, err
	}
	t.watch = watch
	for i, c := range calls {
		if i%4096 == 0 {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if progress != nil {
				progress(i)
			}
		}
		if _, err := t.Call(c.At, c.Key, c.Count); err != nil {
			return nil, &CallError{c, err}
		}
	}
	if watch != nil {
		watch.look(t, watch.To)
	}
	return t, nil
}

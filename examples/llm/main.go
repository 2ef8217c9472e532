// Llm shows limits for calls to a language model, without a job queue:
//
//	go run ./examples/llm
//
// The provider counts requests and tokens, and answers 429 to callers that exceed
// either. The cost of a call is known only after it. So:
//
//   - ask, in the caller's transaction, reserves one request and the most tokens
//     that the call may use, from both limits or from none, and stores the prompt
//     with the receipt of that: no prompt without capacity, and no capacity without
//     a prompt. A batch of prompts is one reservation.
//   - Workers, in any number of processes, claim prompts that are due.
//   - finish stores the answer and settles the receipt by the tokens really used,
//     more or less, in one transaction. The prompt that is not answered yet is the
//     guard: whoever comes second settles nothing.
//   - On a 429 both limits pause for as long as the provider asks, for everybody, and
//     the prompt is put off. Its reservation is settled with nothing used.
//
// The provider is a fake inside this program, and the program checks that
// it had no reason to complain, and that the limits agree with the use.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/examples/internal/demo"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// The limits of the provider, for each organization.
var (
	Requests = ratelimit.TokenBucket{Name: "llm_requests", Rate: 40, Period: time.Second, Capacity: 5}
	Tokens   = ratelimit.TokenBucket{Name: "llm_tokens", Rate: 20_000, Period: time.Second, Capacity: 4_000}
)

const (
	organization = "acme"
	maxTokens    = 500 // that an answer may have: the estimate
	prompts      = 60
	workers      = 8
	pause        = 300 * time.Millisecond // of the one 429
)

// schema is the prompts table. receipt is that of the reservation for the instant run_at.
const schema = `
	CREATE TABLE prompts (
		id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
		prompt  text NOT NULL,
		run_at  timestamptz NOT NULL,
		receipt text NOT NULL,
		used    integer -- tokens; NULL until there is an answer
	)`

const (
	lease = 5 * time.Second // after which a worker that was not heard of is dead
	idle  = 5 * time.Millisecond
)

// Prompts has no state of its own.
type Prompts struct {
	pool  *pgxpool.Pool
	store *pgstore.Store
}

// prompt is one that was claimed.
type prompt struct {
	id      int64
	text    string
	receipt ratelimit.Receipt
}

// ask stores prompts, with one reservation for all of them, inside tx. Each is due when
// its part of that is.
func (p Prompts) ask(ctx context.Context, tx pgx.Tx, texts ...string) error {
	n := float64(len(texts))
	reserved, err := p.store.ReserveTx(ctx, tx, Requests.ForN(organization, n), Tokens.ForN(organization, n*maxTokens))
	if err == nil {
		err = reserved.Err() // a refusal, if they had a MaxReserved
	}
	if err != nil {
		return err
	}
	counts := make([][]float64, len(texts))
	for i := range counts {
		counts[i] = []float64{1, maxTokens}
	}
	parts, err := reserved.Split(counts...)
	if err != nil {
		return err
	}
	for i, part := range parts {
		_, err := tx.Exec(ctx, `INSERT INTO prompts (prompt, run_at, receipt) VALUES ($1, $2, $3)`, texts[i], part.RetryAt, part.Receipt)
		if err != nil {
			return err
		}
	}
	return nil
}

// claim takes a prompt that is due, for as long as the lease, or returns nil.
func (p Prompts) claim(ctx context.Context) (*prompt, error) {
	var claimed prompt
	err := p.pool.QueryRow(ctx, `
		UPDATE prompts SET run_at = clock_timestamp() + $1
		WHERE id = (SELECT id FROM prompts WHERE used IS NULL AND run_at <= clock_timestamp() ORDER BY run_at LIMIT 1 FOR UPDATE SKIP LOCKED)
		RETURNING id, prompt, receipt`, lease).Scan(&claimed.id, &claimed.text, &claimed.receipt)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return &claimed, err
}

// finish stores the tokens that an answer has used, and settles the estimate by them.
func (p Prompts) finish(ctx context.Context, done *prompt, used int) error {
	return pgx.BeginFunc(ctx, p.pool, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE prompts SET used = $2 WHERE id = $1 AND used IS NULL`, done.id, used)
		if err != nil || tag.RowsAffected() == 0 { // another worker was faster, and has settled
			return err
		}
		_, err = p.store.SettleTx(ctx, tx, &done.receipt, 1, float64(used))
		return err
	})
}

// putOff pauses both limits, as the provider asks, and reserves anew: the prompt is due
// after the pause.
func (p Prompts) putOff(ctx context.Context, refused *prompt, retryAfter time.Duration) error {
	return pgx.BeginFunc(ctx, p.pool, func(tx pgx.Tx) error {
		if _, err := p.store.PauseEachTx(ctx, tx, []ratelimit.Request{Requests.For(organization), Tokens.For(organization)}, retryAfter); err != nil {
			return err
		}
		if _, err := p.store.SettleTx(ctx, tx, &refused.receipt, 1, 0); err != nil { // the request has been made
			return err
		}
		again, err := p.store.ReserveTx(ctx, tx, Requests.For(organization), Tokens.ForN(organization, maxTokens))
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `UPDATE prompts SET run_at = $2, receipt = $3 WHERE id = $1`, refused.id, again.RetryAt, again.Receipt)
		return err
	})
}

// begin reports whether a prompt may be put to the provider now, and if there is a pause,
// which has begun after it was reserved for, puts it off until that is over.
func (p Prompts) begin(ctx context.Context, next *prompt) (bool, error) {
	now, err := p.store.Check(ctx, Requests.ForN(organization, 0))
	if err != nil || now.PausedUntil.IsZero() {
		return err == nil, err
	}
	_, err = p.pool.Exec(ctx, `UPDATE prompts SET run_at = $2 WHERE id = $1 AND used IS NULL`, next.id, now.PausedUntil)
	return false, err
}

// work answers prompts until ctx is over.
func (p Prompts) work(ctx context.Context, provider *provider) error {
	for ctx.Err() == nil {
		next, err := p.claim(ctx)
		if err != nil {
			return err
		}
		if next == nil {
			time.Sleep(idle)
			continue
		}
		may, err := p.begin(ctx, next)
		if err != nil {
			return err
		}
		if !may {
			continue
		}
		used, retryAfter := provider.complete(next.text)
		if retryAfter > 0 {
			err = p.putOff(ctx, next, retryAfter)
			provider.pauseIsKnown()
		} else {
			err = p.finish(ctx, next, used)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// That was all of it. The rest uses it, and checks it.

func main() { demo.Main("llm", run) }

func run(ctx context.Context, out io.Writer) (err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	db, err := demo.Database(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if _, err := db.Pool.Exec(ctx, schema); err != nil {
		return err
	}
	store, err := pgstore.New(db.Pool, nil)
	if err != nil {
		return err
	}
	p, provider := Prompts{db.Pool, store}, &provider{}
	begun, err := store.Check(ctx, Tokens.ForN(organization, 0))
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "1. %d prompts of at most %d tokens, for a provider that grants %g requests and %g tokens a second\n",
		prompts, maxTokens, Requests.Rate, Tokens.Rate)
	texts := make([]string, prompts)
	for i := range texts {
		texts[i] = fmt.Sprintf("Why %d?", i)
	}
	if err := pgx.BeginFunc(ctx, p.pool, func(tx pgx.Tx) error { return p.ask(ctx, tx, texts...) }); err != nil {
		return err
	}
	work := func(ctx context.Context) error { return p.work(ctx, provider) }
	if err := demo.WorkAll(ctx, p.pool, workers, `SELECT count(*) FROM prompts WHERE used IS NULL`, work); err != nil {
		return err
	}
	return p.check(ctx, out, provider, begun)
}

// check compares the outcome with the promises.
func (p Prompts) check(ctx context.Context, out io.Writer, provider *provider, begun ratelimit.Result) error {
	var answered int
	var used float64
	if err := p.pool.QueryRow(ctx, `SELECT count(used), sum(used)::float8 FROM prompts`).Scan(&answered, &used); err != nil {
		return err
	}
	now, err := p.store.Check(ctx, Tokens.ForN(organization, 0))
	if err != nil {
		return err
	}
	seconds := now.At.Sub(begun.At).Seconds()
	fmt.Fprintf(out, "2. After %.1f s: %d calls, %.0f tokens used of %d that were reserved\n", seconds, provider.calls, used, prompts*maxTokens)
	most := Tokens.Capacity + Tokens.Rate*seconds
	// All use was settled. So at least the inflow is there, less the use and the tokens that the
	// pause has emptied, give or take the last settlement.
	least := min(Tokens.Capacity, most-used-Tokens.Capacity-Tokens.Rate*pause.Seconds()) - maxTokens
	return errors.Join(
		demo.Claim(out, answered == prompts, "%d of %d prompts answered", answered, prompts),
		demo.Claim(out, used <= most, "%.0f tokens used, %.0f were granted in this time", used, most),
		demo.Claim(out, now.Value >= math.Floor(least), "what was reserved and not used is there again: %.0f tokens", now.Value),
		demo.Claim(out, provider.refused == 1 && provider.disregarded == 0, "%d answer of 429, and %d calls while the pause was known", provider.refused, provider.disregarded))
}

// provider is a fake of a company that rents out language models.
type provider struct {
	mu          sync.Mutex
	calls       int
	refused     int       // answers of 429
	closed      time.Time // until when there is a pause
	known       time.Time // from when the callers knew
	disregarded int       // calls in a pause that was known
}

// onTheWay is how long ago a caller may have looked whether there is a pause.
const onTheWay = 100 * time.Millisecond

// complete answers a prompt, and says how many tokens that took: a few more than it should
// for every tenth. In the middle it is overloaded, once, and says for how long.
func (p *provider) complete(string) (used int, retryAfter time.Duration) {
	n, retryAfter := p.comeIn(time.Now())
	if retryAfter > 0 {
		return 0, retryAfter
	}
	time.Sleep(20 * time.Millisecond) // thinks
	if n%10 == 0 {
		return maxTokens + 50, 0
	}
	return maxTokens * (20 + n%3*10) / 100, 0
}

func (p *provider) comeIn(now time.Time) (n int, retryAfter time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	if now.Before(p.closed) && !p.known.IsZero() && now.After(p.known.Add(onTheWay)) {
		p.disregarded++
	}
	if p.calls == prompts/2 {
		p.closed = now.Add(pause)
		p.refused++
		return p.calls, pause
	}
	return p.calls, 0
}

// pauseIsKnown notes that the callers have heard of the pause.
func (p *provider) pauseIsKnown() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known = time.Now()
}

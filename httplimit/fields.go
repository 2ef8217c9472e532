package httplimit

import (
	"crypto/hmac"
	"crypto/sha256"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/dunglas/httpsfv"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// Fields says which response fields describe the limits. Draft11 | Triple sends both.
type Fields uint8

const (
	// Draft11 is RateLimit-Policy and RateLimit, as in draft 11 of
	// draft-ietf-httpapi-ratelimit-headers:
	//
	//	RateLimit-Policy: "api";q=20;w=120
	//	RateLimit: "api";r=19;t=6
	//
	// q is the limit's Capacity, and w the time in which an empty limit fills, so q/w is the rate.
	// For a quota by the calendar w is the length of the present window. r is the number of whole
	// tokens left, less those that Policy.Above leaves to others. t is the time
	// within which no more than r can be used: until the next token, or the next quota. All times are
	// whole seconds, rounded up. RateLimit of a refusal has only the limits that refused, so t
	// never ends after Retry-After.
	//
	// A limit of requests in flight is in the fields only when all its permits are held:
	//
	//	RateLimit-Policy: "calls";q=10;qu="concurrent-requests"
	//	RateLimit: "calls";r=0
	Draft11 Fields = 1 << iota

	// Triple is RateLimit-Limit, RateLimit-Remaining and RateLimit-Reset (q, r and t) of the limit
	// that decides, as in early revisions of the draft, for older clients.
	Triple

	// NoFields sends neither, for routes on which counts help an attacker, such as logins.
	// Retry-After and the names of the limits that refused are still sent.
	NoFields Fields = 128
)

// Granted reports a grant to Config.Observe, and adds the fields of Config.Fields. Handlers that
// take in their own transaction call it once, after the commit and before they write the answer. It
// does nothing if the result is not a grant: see [Middleware.Answer].
func (m *Middleware) Granted(w http.ResponseWriter, r *http.Request, result ratelimit.Result) {
	if result.OK {
		m.setFields(w.Header(), m.limiter.Granted(r.Context(), r, result, nil))
	}
}

// told lists the outcomes that fields describe.
var told = []ratelimit.Outcome{ratelimit.OutcomeGranted, ratelimit.OutcomeRefused, ratelimit.OutcomePaused}

// setFields adds the fields that tell the client of a grant or a refusal.
func (m *Middleware) setFields(h http.Header, e ratelimit.Event) {
	result := e.Result
	if m.config.Fields == NoFields || !slices.Contains(told, e.Outcome) {
		return
	}
	if m.config.Fields&Draft11 != 0 {
		m.setDraft11(h, e)
	}
	if m.config.Fields&Triple != 0 && result.Request.Limit != nil && result.Request.Mode != ratelimit.ModeShadow {
		h.Set("RateLimit-Limit", strconv.FormatInt(int64(result.Capacity), 10))
		h.Set("RateLimit-Remaining", strconv.FormatInt(remaining(result.Status), 10))
		h.Set("RateLimit-Reset", strconv.FormatInt(seconds(effectiveWindow(result.Status)), 10))
	}
}

// setDraft11 writes the fields of draft 11; no other function does. A later draft gets a function
// of its own.
func (m *Middleware) setDraft11(h http.Header, e ratelimit.Event) {
	var policies, limits httpsfv.List
	if e.Permit != nil && !e.Permit.OK {
		policy, limit := m.full(*e.Permit)
		policies, limits = httpsfv.List{policy}, httpsfv.List{limit}
	}
	for _, s := range edge.Told(e.Result) {
		d := s.Request.Limit.Definition()
		policy := httpsfv.NewItem(d.Name)
		policy.Params.Add("q", int64(d.Capacity))
		policy.Params.Add("w", seconds(fillTime(d, s)))
		limit := httpsfv.NewItem(d.Name)
		limit.Params.Add("r", remaining(s))
		limit.Params.Add("t", seconds(effectiveWindow(s)))
		m.partition(s.Request.Key, policy, limit)
		policies = append(policies, policy)
		if e.Result.OK || !s.OK {
			limits = append(limits, limit)
		}
	}
	addList(h, "RateLimit-Policy", policies)
	addList(h, "RateLimit", limits)
}

// full returns the items of a policy in flight with all permits held. They have no time, since it
// is unknown when a permit will be free.
func (m *Middleware) full(permit ratelimit.Permit) (policy, limit httpsfv.Item) {
	policy, limit = httpsfv.NewItem(permit.InFlight.Name), httpsfv.NewItem(permit.InFlight.Name)
	policy.Params.Add("q", int64(permit.InFlight.Limit))
	policy.Params.Add("qu", "concurrent-requests")
	limit.Params.Add("r", int64(0))
	m.partition(permit.Key, policy, limit)
	return policy, limit
}

// addList adds a list; a middleware around this one may have added another. It leaves out a list
// with a name that the grammar forbids: New has not seen all names.
func addList(h http.Header, name string, list httpsfv.List) {
	if text, err := httpsfv.Marshal(list); err == nil && text != "" {
		h.Add(name, text)
	}
}

// partition adds to each item the partition key of key and of the policy that the item names.
func (m *Middleware) partition(key string, items ...httpsfv.Item) {
	for _, item := range items {
		if len(m.config.PartitionSecret) > 0 {
			mac := hmac.New(sha256.New, m.config.PartitionSecret)
			mac.Write([]byte(edge.Identity(item.Value.(string), key)))
			item.Params.Add("pk", mac.Sum(nil)[:12])
		}
	}
}

// isFieldString reports whether s can be a String of a structured field.
func isFieldString(s string) bool {
	_, err := httpsfv.Marshal(httpsfv.NewItem(s))
	return err == nil
}

// fillTime returns how long an empty limit takes to fill. For a sliding window that is its period,
// in which no more can be used. For a quota by the calendar all windows count as long as the
// present one.
func fillTime(d ratelimit.Definition, s ratelimit.Status) time.Duration {
	periods, period := d.Capacity/d.Rate, d.Period
	if d.Kind == ratelimit.KindFixedWindow {
		periods = math.Ceil(periods)
	}
	if d.Every != 0 {
		from, to := d.Window(s.Request.Key, s.At)
		period = to.Sub(from)
	}
	return time.Duration(min(periods*float64(period), float64(ratelimit.MaxSpan)))
}

// remaining returns the whole tokens that such requests can still take, without those that they
// leave to others.
func remaining(s ratelimit.Status) int64 {
	if s.Request.AboveShare == 0 {
		return s.Remaining
	}
	return int64(max(0, math.Floor(s.Value-s.Request.AboveShare*s.Capacity+1e-9*s.Capacity)))
}

// effectiveWindow returns the time within which no more than the remaining tokens can be used. That
// is until the next whole token; for a full limit, the time that one takes to come back after use.
func effectiveWindow(s ratelimit.Status) time.Duration {
	if s.Request.Mode == ratelimit.ModeRefuse { // nothing is left until the mode ends
		return s.RetryAfter
	}
	d := s.Request.Limit.Definition()
	wait := nextToken(d, s)
	if paused := s.PausedUntil.Sub(s.At); !s.PausedUntil.IsZero() && paused > 0 {
		if d.Kind == ratelimit.KindSlidingWindow || d.Every != 0 { // slots and edges of the calendar go on during a pause
			wait = max(wait, paused)
		} else {
			wait += paused
		}
	}
	if !s.OK {
		wait = min(wait, s.RetryAfter)
	}
	return wait
}

func nextToken(d ratelimit.Definition, s ratelimit.Status) time.Duration {
	if d.Every != 0 {
		if missing := d.Capacity - s.Value; missing > 0 && missing <= d.Rate {
			return s.ResetAfter // the next edge that counts, also after the anchor moved
		}
		_, to := d.Window(s.Request.Key, s.At)
		return to.Sub(s.At)
	}
	if d.Kind == ratelimit.KindFixedWindow {
		// ResetAfter ends at an edge. The next edge is a whole number of periods earlier.
		if next := s.ResetAfter % d.Period; next > 0 {
			return next
		}
		return d.Period
	}
	if d.Kind == ratelimit.KindSlidingWindow {
		// Taken tokens come back at the beginning of slots, the last of them at ResetAfter.
		if s.ResetAfter == 0 {
			return d.Period
		}
		return (s.ResetAfter-1)%d.SlotWidth() + 1
	}
	missing := min(float64(s.Remaining)+1-s.Value, 1)
	if s.Value < 0 {
		missing = 1 - s.Value
	}
	return time.Duration(min(missing/d.Rate*float64(d.Period), float64(ratelimit.MaxSpan)))
}

// seconds returns d in whole seconds, rounded up, and at least 1.
func seconds(d time.Duration) int64 {
	return max(1, int64((d+time.Second-1)/time.Second))
}

package httplimit

import (
	"context"
	_ "embed"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// PredictJS is a JavaScript module, smaller than 3 KB and without dependencies. Between two
// answers, a page calculates with it how many requests are left and when the next one may go. It
// reads the answers of [Middleware.StatusHandler], and the member "limits" of problems.
//
//go:embed predict.js
var PredictJS []byte

// LimitStatus is the status of a limit with its definition, for clients that predict. It has no
// key. In JSON its instants and its period are in milliseconds, with fractions.
type LimitStatus struct {
	Name     string
	Kind     ratelimit.Kind
	Rate     float64       // tokens per Period
	Period   time.Duration // 0 of a quota by the calendar
	Capacity float64
	Value    float64 // tokens at At

	At          time.Time // on the database's clock
	FullAt      time.Time // when there is all of Capacity again, if nothing is taken
	PausedUntil time.Time // the end of a pause; zero without one, and then 0 in JSON
}

// LimitsOf returns the status of each limit of a call, in its order. It leaves out limits that are
// in ModeShadow or were not asked.
func LimitsOf(result ratelimit.Result) []LimitStatus {
	limits := make([]LimitStatus, 0, 1)
	for _, s := range edge.Told(result) {
		d := s.Request.Limit.Definition()
		if d.Every != 0 { // a client does not know the edges
			d.Period = 0
		}
		limits = append(limits, LimitStatus{
			Name: d.Name, Kind: d.Kind, Rate: d.Rate, Period: d.Period, Capacity: d.Capacity,
			Value: s.Value, At: s.At, FullAt: s.FullAt(), PausedUntil: s.PausedUntil,
		})
	}
	return limits
}

// MarshalJSON returns the status as a JSON object, as [PredictJS] reads it.
func (s LimitStatus) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Name        string  `json:"name"`
		Kind        string  `json:"kind"`
		Rate        float64 `json:"rate"`
		Period      float64 `json:"period"`
		Capacity    float64 `json:"capacity"`
		Value       float64 `json:"value"`
		At          float64 `json:"at"`
		FullAt      float64 `json:"fullAt"`
		PausedUntil float64 `json:"pausedUntil"`
	}{
		s.Name, s.Kind.String(), s.Rate, float64(s.Period) / float64(time.Millisecond), s.Capacity, s.Value,
		milliseconds(s.At), milliseconds(s.FullAt), milliseconds(s.PausedUntil),
	})
}

func milliseconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMicro()) / 1000
}

// StatusStore is the part of a store that [Middleware.StatusHandler] needs: a *pgstore.Store or
// a *memstore.Store.
type StatusStore interface {
	Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error)
}

// StatusHandler returns a handler that answers GET and HEAD with the status of the policies' limits
// for the request's key: {"limits": […]}, each a [LimitStatus], without policies that do not apply.
// It takes nothing. If the request has no usable key, or the store does not answer, it writes the
// middleware's problem. Put it behind authentication, like any other handler.
func (m *Middleware) StatusHandler(store StatusStore) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			(&Problem{Title: http.StatusText(http.StatusMethodNotAllowed), Status: http.StatusMethodNotAllowed}).Write(w)
			return
		}
		requests, err := m.Requests(r)
		var result ratelimit.Result
		if err == nil && len(requests) > 0 {
			for i := range requests {
				requests[i].Count, requests[i].AboveShare = 0, 0
			}
			ctx, cancel := context.WithTimeout(r.Context(), m.limiter.Timeout)
			defer cancel()
			result, err = store.Check(ctx, requests...)
		}
		if err != nil {
			m.answer(w, r, m.limiter.EventOf(err))
			return
		}
		body, _ := json.Marshal(map[string]any{"limits": LimitsOf(result)}) // of strings and finite numbers, which cannot fail
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("Content-Length", strconv.Itoa(len(body)+1))
		w.Write(append(body, '\n')) // the client may have gone
	})
}

package httplimit_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// A server that refuses everything, whatever it says of the wait, gets the requests that are under
// way when it begins, and then a few: 100 goroutines that never give up send less than 110 in 2 s.
// Of what it says, what is true is waited for, and nothing for longer than MaxPause.
func TestTransportAgainstHostileServers(t *testing.T) {
	const date = "Sat, 14 Mar 2026 12:00:00 GMT" // noon
	past := fmt.Sprint(noon.Add(-time.Minute).Unix())
	for _, test := range []struct {
		name   string
		status int
		header []string
		want   time.Duration // of the second request, at least
	}{
		{"Retry-After: 0", 429, []string{"Retry-After", "0"}, 500 * time.Millisecond},
		{"Retry-After: 0.001", 429, []string{"Retry-After", "0.001"}, time.Millisecond},
		{"Retry-After, a date that is past", 429, []string{"Retry-After", "Sat, 14 Mar 2026 11:00:00 GMT"}, 500 * time.Millisecond},
		{"Retry-After, the year 9999", 429, []string{"Retry-After", "Fri, 31 Dec 9999 23:59:59 GMT"}, 500 * time.Millisecond},
		{"Retry-After, a month", 429, []string{"Retry-After", "2592000"}, 5 * time.Minute},
		{"nothing", 429, nil, 500 * time.Millisecond},
		{"RateLimit-Reset that is past", 429, []string{"RateLimit-Remaining", "0", "RateLimit-Reset", past}, 500 * time.Millisecond},
		{"RateLimit with t=0", 429, []string{"RateLimit", `"a";r=0;t=0`}, 500 * time.Millisecond},
		{"403 with nothing left, already reset", 403, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", past}, 500 * time.Millisecond},
		{"420 with nothing left", 420, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "60"}, time.Minute},
		{"503 with nothing left", 503, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "0"}, 500 * time.Millisecond},
		{"503 with Retry-After: 0", 503, []string{"Retry-After", "0"}, 500 * time.Millisecond},
		{"529 with nothing left", 529, []string{"Anthropic-Ratelimit-Tokens-Remaining", "0", "Anthropic-Ratelimit-Tokens-Reset", "2026-03-14T12:01:00Z"}, time.Minute},
		{"a duration of 9ms", 429, []string{"X-RateLimit-Remaining-Requests", "0", "X-RateLimit-Reset-Requests", "9ms"}, 9 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			begin, sent, second := time.Now(), 0, time.Duration(0)
			server := roundTripper(func(*http.Request) (*http.Response, error) {
				mu.Lock()
				sent++
				if at := time.Since(begin); at > 5*time.Millisecond && second == 0 {
					second = at
				}
				mu.Unlock()
				time.Sleep(5 * time.Millisecond) // so that all are under way
				return response(test.status, append([]string{"Date", date}, test.header...)...), nil
			})
			quota := ratelimit.TokenBucket{Name: "partner", Rate: 1e6, Period: time.Second}
			store := memstore.New(nil)
			shared := newTransport(t, httplimit.TransportConfig{
				Base: server, Store: store, Limit: func(*http.Request) ratelimit.Request { return quota.For("") },
			})
			for _, transport := range []*httplimit.Transport{newTransport(t, httplimit.TransportConfig{Base: server}), shared} {
				begin, sent, second = time.Now(), 0, 0
				var wg sync.WaitGroup
				for range 100 {
					wg.Go(func() {
						for time.Since(begin) < 2*time.Second {
							if resp, err := transport.RoundTrip(request(t, http.MethodGet, nil)); err == nil {
								resp.Body.Close()
							} else {
								time.Sleep(50 * time.Millisecond) // it was not sent, and the caller comes again
							}
						}
					})
				}
				time.Sleep(2 * time.Second)
				mu.Lock()
				inTime := sent
				mu.Unlock()
				t.Logf("%-40s %3d requests in 2 s, the second round after %v", test.name, inTime, second)
				if inTime < 100 || inTime >= 110 {
					t.Errorf("%s: %d requests in 2 s, want 100 to 109", test.name, inTime)
				}
				wg.Wait()
				status, err := store.Check(t.Context(), quota.For(""))
				if err != nil || time.Until(status.PausedUntil) > 5*time.Minute {
					t.Errorf("%s: the shared limit is paused until %v, %v", test.name, status.PausedUntil, err)
				}
				time.Sleep(6 * time.Minute)
				resp, err := transport.RoundTrip(request(t, http.MethodPost, nil))
				if err != nil || resp.StatusCode != test.status || second != 0 && second < test.want {
					t.Errorf("%s: after 6 minutes got %v, %v; the second round came after %v, want at least %v", test.name, resp, err, second, test.want)
				}
			}
		})
	}
}

// When a server that has refused grants again, all who were held back go, soon and not all at
// once; also when its answers take long.
func TestTransportRecovers(t *testing.T) {
	for _, slow := range []time.Duration{10 * time.Millisecond, 20 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			begin, sent := time.Now(), map[time.Duration]int{}
			var last time.Duration
			transport := newTransport(t, httplimit.TransportConfig{Base: roundTripper(func(*http.Request) (*http.Response, error) {
				at := time.Since(begin)
				if at < 2*time.Second {
					return response(429, "Retry-After", "5"), nil
				}
				mu.Lock()
				last = at
				sent[at.Truncate(10*time.Millisecond)]++
				mu.Unlock()
				time.Sleep(slow)
				return response(200), nil
			})})
			var wg sync.WaitGroup
			for range 200 {
				wg.Go(func() {
					resp, err := transport.RoundTrip(request(t, http.MethodGet, nil))
					if err != nil || resp.StatusCode != 200 {
						t.Errorf("got %v, %v, want 200", resp, err)
					}
				})
			}
			wg.Wait()
			most := 0
			for at, n := range sent {
				if at < 5500*time.Millisecond {
					most = max(most, n)
				}
			}
			if last < 5*time.Second || last > 7*time.Second || most > 50 {
				t.Errorf("answers after %v: the last was sent after %v, at most %d in 10 ms", slow, last, most)
			}
			t.Logf("answers after %v: the last of 200 was sent after %v", slow, last)
		})
	}
}

// A server that refuses slowly, as one does that has too much to do, has one request in each round too.
func TestTransportAgainstSlowRefusals(t *testing.T) {
	for _, slow := range []time.Duration{200 * time.Millisecond, 300 * time.Millisecond, 3 * time.Second, 20 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			var sent atomic.Int64
			transport := newTransport(t, httplimit.TransportConfig{Base: roundTripper(func(*http.Request) (*http.Response, error) {
				sent.Add(1)
				time.Sleep(slow)
				return response(http.StatusTooManyRequests, "Retry-After", "0"), nil
			})})
			begin := time.Now()
			var wg sync.WaitGroup
			for range 100 {
				wg.Go(func() {
					for time.Since(begin) < time.Minute {
						if _, err := transport.RoundTrip(request(t, http.MethodGet, nil)); err != nil {
							time.Sleep(50 * time.Millisecond)
						}
					}
				})
			}
			wg.Wait()
			if n := sent.Load(); n < 100 || n > 115 {
				t.Errorf("refusals after %v: %d requests in a minute, want 100 and one for each round", slow, n)
			}
		})
	}
}

// A limit that cannot be paused after a refusal, since its database is silent, delays no answer for
// longer than the request may wait.
func TestTransportPauseHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quota := ratelimit.TokenBucket{Name: "partner", Rate: 1, Period: time.Second, Capacity: 10}
		store := hanging{memstore.New(nil)}
		config := httplimit.TransportConfig{
			Base:   roundTripper(func(*http.Request) (*http.Response, error) { return response(429, "Retry-After", "60"), nil }),
			Store:  store,
			Limit:  func(*http.Request) ratelimit.Request { return quota.For("") },
			Logger: slog.New(slog.DiscardHandler),
		}
		for _, maxWait := range []time.Duration{0, 100 * time.Millisecond} {
			config.MaxWait = maxWait
			ctx, cancel := context.WithCancel(t.Context())
			if maxWait == 0 {
				time.AfterFunc(100*time.Millisecond, cancel)
			}
			begin := time.Now()
			resp, err := newTransport(t, config).RoundTrip(request(t, http.MethodGet, nil).WithContext(ctx))
			if waited := time.Since(begin); err != nil || resp.StatusCode != 429 || waited > 100*time.Millisecond {
				t.Errorf("MaxWait %v: got %v, %v after %v, want 429 after 100ms", maxWait, resp, err, waited)
			}
			cancel()
		}
		time.Sleep(5 * time.Second) // until the pauses have given up
	})
}

// hanging is a store that answers no Pause.
type hanging struct{ *memstore.Store }

func (hanging) Pause(ctx context.Context, _ ratelimit.Limit, _ string, _ time.Duration) (time.Time, error) {
	<-ctx.Done()
	return time.Time{}, ctx.Err()
}

func TestTransportNotMade(t *testing.T) {
	for _, transport := range []*httplimit.Transport{nil, {}} {
		transport.CloseIdleConnections()
		if resp, err := transport.RoundTrip(request(t, http.MethodGet, nil)); resp != nil || !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("got %v, %v, want ErrInvalid", resp, err)
		}
	}
}

package httplimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// server is a base that answers by a function and notes when it was asked, and what
// became of the bodies of its answers.
type server struct {
	begin  time.Time
	answer func(n int, r *http.Request) *http.Response

	mu     sync.Mutex
	asked  []time.Duration
	bodies []string // of the requests
	open   int      // bodies of responses that are not closed
}

func newServer(answer func(n int, r *http.Request) *http.Response) *server {
	return &server{begin: time.Now(), answer: answer}
}

func (s *server) RoundTrip(r *http.Request) (*http.Response, error) {
	var sent []byte
	if r.Body != nil {
		sent, _ = io.ReadAll(r.Body)
		r.Body.Close()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, time.Since(s.begin))
	s.bodies = append(s.bodies, string(sent))
	resp := s.answer(len(s.asked), r)
	s.open++
	resp.Body = &countedBody{ReadCloser: resp.Body, s: s}
	return resp, nil
}

type countedBody struct {
	io.ReadCloser
	s    *server
	once sync.Once
}

func (b *countedBody) Close() error {
	b.once.Do(func() {
		b.s.mu.Lock()
		b.s.open--
		b.s.mu.Unlock()
	})
	return b.ReadCloser.Close()
}

func response(status int, pairs ...string) *http.Response {
	return &http.Response{StatusCode: status, Header: header(pairs...), Body: io.NopCloser(strings.NewReader("body"))}
}

// refusing refuses the first requests, with these fields.
func refusing(refusals, status int, pairs ...string) func(int, *http.Request) *http.Response {
	return func(n int, _ *http.Request) *http.Response {
		if n <= refusals {
			return response(status, pairs...)
		}
		return response(200)
	}
}

func newTransport(t *testing.T, config httplimit.TransportConfig) *httplimit.Transport {
	t.Helper()
	config.Logger = discardLogs
	transport, err := httplimit.NewTransport(&config)
	must(t, err)
	return transport
}

func request(t *testing.T, method string, body io.Reader, pairs ...string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://partner.example/path", body)
	must(t, err)
	for i := 0; i < len(pairs); i += 2 {
		r.Header.Set(pairs[i], pairs[i+1])
	}
	return r
}

// within reports whether an instant is at want or up to a tenth after it.
func within(got, want time.Duration) bool { return got >= want && got <= want+want/10 }

func TestTransportWaitsAndTriesAgain(t *testing.T) {
	for _, test := range []struct {
		name   string
		answer func(int, *http.Request) *http.Response
		asked  []time.Duration
		status int
	}{
		{"granted", refusing(0, 0), []time.Duration{0}, 200},
		{"Retry-After", refusing(1, 429, "Retry-After", "7"), []time.Duration{0, 7 * time.Second}, 200},
		{"Retry-After twice", refusing(2, 429, "Retry-After", "7"), []time.Duration{0, 7 * time.Second, 14 * time.Second}, 200},
		{"Retry-After of a 503", refusing(1, 503, "Retry-After", "7"), []time.Duration{0, 7 * time.Second}, 200},
		{"503 with nothing left", refusing(1, 503, "RateLimit", `"a";r=0;t=9`), []time.Duration{0, 9 * time.Second}, 200},
		{"529 with nothing left", refusing(1, 529, "RateLimit", `"a";r=0;t=9`), []time.Duration{0, 9 * time.Second}, 200},
		{"529 without", refusing(1, 529), []time.Duration{0}, 529},
		{"Retry-After of a 403", refusing(1, 403, "Retry-After", "7"), []time.Duration{0, 7 * time.Second}, 200},
		{"403 with nothing left", refusing(1, 403, "RateLimit", `"a";r=0;t=9`), []time.Duration{0, 9 * time.Second}, 200},
		{"403 with something left", refusing(1, 403, "RateLimit", `"a";r=1;t=9`), []time.Duration{0}, 403},
		{"503 without", refusing(1, 503), []time.Duration{0}, 503},
		{"500", refusing(1, 500, "Retry-After", "7"), []time.Duration{0}, 500},
		{"Retry-After before the list", refusing(1, 429, "RateLimit", `"a";r=0;t=2`, "Retry-After", "5"), []time.Duration{0, 5 * time.Second}, 200},
		{"longer than MaxWait", refusing(1, 429, "Retry-After", "31"), []time.Duration{0}, 429},
		{"longer than MaxWait together", refusing(9, 429, "Retry-After", "12"), []time.Duration{0, 12 * time.Second, 24 * time.Second}, 429},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer(test.answer)
			resp, err := newTransport(t, httplimit.TransportConfig{Base: s}).RoundTrip(request(t, http.MethodGet, nil))
			if err != nil {
				t.Errorf("%s: %v", test.name, err)
				return
			}
			if resp.StatusCode != test.status || !slices.EqualFunc(s.asked, test.asked, within) {
				t.Errorf("%s: got %d, asked at %v, want %d, %v", test.name, resp.StatusCode, s.asked, test.status, test.asked)
			}
			if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "body" {
				t.Errorf("%s: got the body %q, %v", test.name, body, err)
			}
			resp.Body.Close()
			if s.open != 0 {
				t.Errorf("%s: %d bodies are still open", test.name, s.open)
			}
		})
	}
}

// A refusal that says nothing, or nothing of use, is tried again after a while, ever longer. One
// that names a wait is believed, but when it was kept and not enough.
func TestTransportBacksOff(t *testing.T) {
	const ms = time.Millisecond
	unsaid := []time.Duration{500 * ms, time.Second, 2 * time.Second}
	for _, test := range []struct {
		header []string
		least  []time.Duration
	}{
		{nil, unsaid},
		{[]string{"Retry-After", "0"}, unsaid},
		{[]string{"Retry-After", "Fri, 13 Mar 2026 12:00:00 GMT", "Date", "Sat, 14 Mar 2026 12:00:00 GMT"}, unsaid},
		{[]string{"Retry-After", "99999999999999999999"}, unsaid},
		{[]string{"Retry-After", "0.001"}, []time.Duration{ms, 50 * ms, 100 * ms}},
		{[]string{"Retry-After", "3"}, []time.Duration{3 * time.Second, 3 * time.Second, 3 * time.Second}},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer(refusing(9, 429, test.header...))
			resp, err := newTransport(t, httplimit.TransportConfig{Base: s}).RoundTrip(request(t, http.MethodGet, nil))
			if err != nil || resp.StatusCode != 429 || len(s.asked) != 4 {
				t.Errorf("%v: got %v, %v, asked at %v, want the fourth 429", test.header, resp, err, s.asked)
				return
			}
			for i, least := range test.least {
				if wait := s.asked[i+1] - s.asked[i]; wait < least || wait > 2*least+least/5 {
					t.Errorf("%v: wait %d: got %v, want %v to twice that", test.header, i+1, wait, least)
				}
			}
		})
	}
}

func TestTransportRepeatsOnlyWhatIsSafe(t *testing.T) {
	once := func(s string) io.Reader { return io.MultiReader(strings.NewReader(s)) } // which net/http cannot rewind
	for _, test := range []struct {
		name   string
		method string
		body   io.Reader
		header []string
		tries  int
	}{
		{"GET", "GET", nil, nil, 2},
		{"HEAD", "HEAD", nil, nil, 2},
		{"OPTIONS", "OPTIONS", nil, nil, 2},
		{"DELETE", "DELETE", nil, nil, 2},
		{"PUT", "PUT", strings.NewReader("sent"), nil, 2},
		{"PUT, once", "PUT", once("sent"), nil, 1},
		{"POST", "POST", strings.NewReader("sent"), nil, 1},
		{"POST without a body", "POST", nil, nil, 1},
		{"PATCH", "PATCH", strings.NewReader("sent"), nil, 1},
		{"POST with a key", "POST", strings.NewReader("sent"), []string{"Idempotency-Key", "1"}, 2},
		{"POST with a key, once", "POST", once("sent"), []string{"Idempotency-Key", "1"}, 1},
		{"a method of one's own", "BREW", nil, nil, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer(refusing(1, 429, "Retry-After", "1"))
			r := request(t, test.method, test.body, test.header...)
			before := r.Header.Clone()
			resp, err := newTransport(t, httplimit.TransportConfig{Base: s}).RoundTrip(r)
			if err != nil || len(s.asked) != test.tries {
				t.Errorf("%s: got %v, and %d tries, want %d", test.name, err, len(s.asked), test.tries)
				return
			}
			resp.Body.Close()
			for i, body := range s.bodies {
				if test.body != nil && body != "sent" {
					t.Errorf("%s: try %d sent %q, want all of the body", test.name, i+1, body)
				}
			}
			if fmt.Sprint(r.Header) != fmt.Sprint(before) {
				t.Errorf("%s: the request was changed", test.name)
			}
			if s.open != 0 {
				t.Errorf("%s: %d bodies are still open", test.name, s.open)
			}
		})
	}
}

// A request whose body cannot be had again keeps the server's answer.
func TestTransportBodyIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(refusing(1, 429, "Retry-After", "1"))
		r := request(t, http.MethodPut, strings.NewReader("sent"))
		r.GetBody = func() (io.ReadCloser, error) { return nil, errDatabase }
		resp, err := newTransport(t, httplimit.TransportConfig{Base: s}).RoundTrip(r)
		if err != nil || resp.StatusCode != 429 {
			t.Fatalf("got %v, %v, want the 429", resp, err)
		}
		if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "body" {
			t.Errorf("got the body %q, %v", body, err)
		}
	})
}

// closing is a request's body that knows whether it was closed.
type closing struct {
	io.Reader
	closed bool
}

func (c *closing) Close() error { c.closed = true; return nil }

// After a refusal all requests to that server are held back, and no others.
func TestTransportHoldsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(refusing(1, 429, "Retry-After", "10"))
		transport := newTransport(t, httplimit.TransportConfig{Base: s, MaxTries: 1})
		send := func(r *http.Request) (int, error) {
			resp, err := transport.RoundTrip(r)
			if err != nil {
				return 0, err
			}
			resp.Body.Close()
			return resp.StatusCode, nil
		}
		if status, err := send(request(t, "POST", nil)); status != 429 || err != nil {
			t.Fatalf("got %d, %v, want 429", status, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		body := &closing{Reader: strings.NewReader("sent")}
		_, err := send(request(t, "POST", body).WithContext(ctx))
		var wait *httplimit.WaitError
		if !errors.As(err, &wait) || !wait.Until.Equal(s.begin.Add(10*time.Second)) || time.Since(s.begin) != 0 || !body.closed {
			t.Errorf("with too little time: got %v at once: %v, the body closed: %v, want a WaitError until then", err, time.Since(s.begin) == 0, body.closed)
		}
		other := request(t, "GET", nil)
		other.URL.Host = "other.example"
		if status, err := send(other); status != 200 || err != nil || time.Since(s.begin) != 0 {
			t.Errorf("another server: got %d, %v, want 200 at once", status, err)
		}
		ctx, leave := context.WithCancel(t.Context())
		time.AfterFunc(2*time.Second, leave)
		if _, err := send(request(t, "GET", nil).WithContext(ctx)); !errors.Is(err, context.Canceled) || time.Since(s.begin) != 2*time.Second {
			t.Errorf("given up after 2 s: got %v after %v", err, time.Since(s.begin))
		}
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if status, err := send(request(t, "GET", nil)); status != 200 || err != nil {
					t.Errorf("got %d, %v, want 200", status, err)
				}
			})
		}
		wg.Wait()
		held := s.asked[2:]
		slices.Sort(held)
		if len(held) != 20 || held[0] < 10*time.Second || held[19] > 11*time.Second || held[0] == held[19] {
			t.Errorf("got %v, want 20 requests, spread from 10 s on", held)
		}
	})
}

// The longest hold holds, and none holds for longer than MaxPause.
func TestTransportHoldsForTheLongest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		transport := newTransport(t, httplimit.TransportConfig{MaxWait: 3 * time.Hour, MaxPause: time.Hour, Base: roundTripper(func(*http.Request) (*http.Response, error) {
			switch asked.Add(1) {
			case 1:
				time.Sleep(time.Second) // so that both are under way
				return response(429, "Retry-After", "7200"), nil
			case 2:
				time.Sleep(2 * time.Second)
				return response(429, "Retry-After", "2"), nil
			}
			return response(200), nil
		})})
		begun := time.Now()
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				resp, err := transport.RoundTrip(request(t, "POST", nil))
				if err != nil || resp.StatusCode != 429 {
					t.Errorf("got %v, %v, want 429", resp, err)
				}
			})
		}
		wg.Wait()
		resp, err := transport.RoundTrip(request(t, "GET", nil))
		if err != nil || resp.StatusCode != 200 || !within(time.Since(begun), time.Hour+time.Second) {
			t.Errorf("got %v, %v after %v, want 200 after an hour", resp, err, time.Since(begun))
		}
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A server that says that nothing is left is believed, unless that were to fail a request.
func TestTransportHeedsExhaustion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(func(n int, _ *http.Request) *http.Response {
			return response(200, "RateLimit", fmt.Sprintf(`"a";r=0;t=%d`, []int{5, 3600, 0}[n-1]))
		})
		transport := newTransport(t, httplimit.TransportConfig{Base: s})
		for range 3 {
			resp, err := transport.RoundTrip(request(t, "POST", nil))
			must(t, err)
			resp.Body.Close()
		}
		if want := []time.Duration{0, 5 * time.Second, 5 * time.Second}; !slices.EqualFunc(s.asked, want, within) {
			t.Errorf("asked at %v, want %v", s.asked, want)
		}
	})
}

// A body that does not come to its end holds nothing up.
func TestTransportEndlessBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reader, writer := io.Pipe() // nobody writes
		defer writer.Close()
		s := newServer(func(n int, _ *http.Request) *http.Response {
			resp := response(200)
			if n == 1 {
				resp = response(429, "Retry-After", "1")
				resp.Body = reader
			}
			return resp
		})
		resp, err := newTransport(t, httplimit.TransportConfig{Base: s}).RoundTrip(request(t, "GET", nil))
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("got %v, %v, want 200", resp, err)
		}
		if got := time.Since(s.begin); !within(got, time.Second) {
			t.Errorf("it took %v, want 1 s", got)
		}
	})
}

// Two processes that share a partner's quota keep to it together, and a 429 that one
// gets holds back both.
func TestTransportsShareALimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quota := ratelimit.TokenBucket{Name: "partner", Rate: 10, Period: time.Second, Capacity: 1}
		store := memstore.New(nil)
		s := newServer(func(n int, _ *http.Request) *http.Response {
			if n == 10 {
				return response(429, "Retry-After", "5")
			}
			return response(200)
		})
		var wg sync.WaitGroup
		for range 2 {
			transport := newTransport(t, httplimit.TransportConfig{
				Base: s, Store: store, Limit: func(*http.Request) ratelimit.Request { return quota.For("") },
			})
			for range 10 {
				wg.Go(func() {
					resp, err := transport.RoundTrip(request(t, "GET", nil))
					if err != nil || resp.StatusCode != 200 {
						t.Errorf("got %v, %v, want 200", resp, err)
						return
					}
					resp.Body.Close()
				})
			}
		}
		wg.Wait()
		if len(s.asked) != 21 {
			t.Fatalf("%d requests were sent, want 21", len(s.asked))
		}
		for i := 1; i < len(s.asked); i++ {
			least := 100 * time.Millisecond
			if i == 10 {
				least = 5 * time.Second
			}
			if gap := s.asked[i] - s.asked[i-1]; gap < least-time.Millisecond {
				t.Errorf("request %d came %v after the one before, want %v: %v", i+1, gap, least, s.asked)
			}
		}
	})
}

// A request that waits for its own limit is held back too by what the server says
// meanwhile to another one, of another limit.
func TestTransportHoldsBackWhoWaitsForTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(func(_ int, r *http.Request) *http.Response {
			if r.Method == http.MethodPost {
				return response(429, "Retry-After", "10")
			}
			return response(200)
		})
		transport := newTransport(t, httplimit.TransportConfig{Base: s, Store: memstore.New(nil), Limit: func(r *http.Request) ratelimit.Request {
			return ratelimit.TokenBucket{Name: r.Method, Rate: 1, Period: 3 * time.Second}.For("")
		}})
		send := func(method string) {
			resp, err := transport.RoundTrip(request(t, method, nil))
			if err != nil {
				t.Error(err)
				return
			}
			resp.Body.Close()
		}
		send(http.MethodGet)
		var wg sync.WaitGroup
		wg.Go(func() { send(http.MethodGet) }) // has a token after 3 s
		time.Sleep(time.Second)
		send(http.MethodPost)
		wg.Wait()
		if want := []time.Duration{0, time.Second, 11 * time.Second}; !slices.EqualFunc(s.asked, want, within) {
			t.Errorf("asked at %v, want %v", s.asked, want)
		}
	})
}

// broken is a store that does not answer.
type broken struct{}

func (broken) Allow(context.Context, ...ratelimit.Request) (ratelimit.Result, error) {
	return ratelimit.Result{}, errDatabase
}

func (broken) Pause(context.Context, ratelimit.Limit, string, time.Duration) (time.Time, error) {
	return time.Time{}, errDatabase
}

func TestTransportStoreFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(refusing(0, 0))
		quota := ratelimit.TokenBucket{Name: "partner", Rate: 1, Period: time.Hour}
		transport := newTransport(t, httplimit.TransportConfig{Base: s, Store: broken{}, Limit: func(r *http.Request) ratelimit.Request {
			if r.Method == "GET" {
				return quota.For("")
			}
			return ratelimit.Request{}
		}})
		var wait *httplimit.WaitError
		if _, err := transport.RoundTrip(request(t, "GET", nil)); !errors.Is(err, errDatabase) || errors.As(err, &wait) {
			t.Errorf("got %v, want the store's error", err)
		}
		if resp, err := transport.RoundTrip(request(t, "POST", nil)); err != nil || resp.StatusCode != 200 {
			t.Errorf("without a limit: got %v, %v, want 200", resp, err)
		}
		full := newTransport(t, httplimit.TransportConfig{Base: s, Store: memstore.New(nil), Limit: func(*http.Request) ratelimit.Request { return quota.For("") }})
		if _, err := full.RoundTrip(request(t, "GET", nil)); err != nil {
			t.Error(err)
		}
		if _, err := full.RoundTrip(request(t, "GET", nil)); !errors.As(err, &wait) || !errors.Is(err, ratelimit.ErrRefused) {
			t.Errorf("with nothing left: got %v, want a WaitError", err)
		}
		if len(s.asked) != 2 {
			t.Errorf("%d requests were sent, want 2", len(s.asked))
		}
	})
}

func TestNewTransportFindsFaults(t *testing.T) {
	for name, config := range map[string]httplimit.TransportConfig{
		"MaxWait":  {MaxWait: -1},
		"MaxTries": {MaxTries: -1},
		"MaxPause": {MaxPause: -1},
		"Store":    {Store: broken{}},
	} {
		if _, err := httplimit.NewTransport(&config); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), name) {
			t.Errorf("got %v, want ErrInvalid with %q", err, name)
		}
	}
	if _, err := httplimit.NewTransport(nil); err != nil {
		t.Error(err)
	}
}

package httplimit_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

var (
	perMinute = ratelimit.TokenBucket{Name: "per_minute", Rate: 10, Period: time.Minute, Capacity: 3}
	perDay    = ratelimit.FixedWindow{Name: "per_day", Rate: 4, Period: 24 * time.Hour, Start: noon}
)

var byUser = httplimit.ByHeader("X-User")

func TestNewFindsFaults(t *testing.T) {
	named := func(name string) []httplimit.Policy {
		l := perMinute
		l.Name = name
		return []httplimit.Policy{{Limit: l}}
	}
	good := named("a")
	empty := ratelimit.TokenBucket{Name: "empty", Rate: 1, Period: time.Second, Capacity: ratelimit.None}
	for _, test := range []struct {
		name   string
		config *httplimit.Config
		want   string
	}{
		{"no config", nil, "Config"},
		{"no policy", &httplimit.Config{}, "Policies"},
		{"no limit", &httplimit.Config{Policies: []httplimit.Policy{{}}}, "Limits[0]"},
		{"a bad limit", &httplimit.Config{Policies: []httplimit.Policy{{Limit: ratelimit.TokenBucket{Name: "a"}}}}, "Rate"},
		{"the same name twice", &httplimit.Config{Policies: append(named("a"), named("a")...)}, "defined twice"},
		{"a name with a letter outside of ASCII", &httplimit.Config{Policies: named("größe")}, "printable ASCII"},
		{"a name with a line break", &httplimit.Config{Policies: named("a\r\nSet-Cookie: b")}, "printable ASCII"},
		{"a limit that holds nothing", &httplimit.Config{Policies: []httplimit.Policy{{Limit: empty}}}, "Capacity"},
		{"a share above 1", &httplimit.Config{Policies: []httplimit.Policy{{Limit: perMinute, Above: 1.1}}}, "Above"},
		{"a share that is no number", &httplimit.Config{Policies: []httplimit.Policy{{Limit: perMinute, Above: math.NaN()}}}, "Above"},
		{"jitter above 1", &httplimit.Config{Policies: good, Jitter: 1.1}, "Jitter"},
		{"jitter that is no number", &httplimit.Config{Policies: good, Jitter: math.NaN()}, "Jitter"},
		{"a negative bound of jitter", &httplimit.Config{Policies: good, MaxJitter: -1}, "MaxJitter"},
		{"another status for too much", &httplimit.Config{Policies: good, TooLarge: 429}, "TooLarge"},
		{"a negative time-out", &httplimit.Config{Policies: good, Timeout: -1}, "Timeout"},
		{"a negative wait", &httplimit.Config{Policies: good, FailureRetryAfter: -1}, "FailureRetryAfter"},
		{"fields that there are not", &httplimit.Config{Policies: good, Fields: 64}, "Fields"},
	} {
		_, err := httplimit.New(memstore.New(nil), test.config)
		if !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(fmt.Sprint(err), test.want) {
			t.Errorf("%s: got %v, want ErrInvalid with %q", test.name, err, test.want)
		}
	}
	_, err := httplimit.New(nil, &httplimit.Config{Policies: append(named("größe"), httplimit.Policy{Limit: empty}), Jitter: -1, Timeout: -1})
	for _, want := range []string{"Store", "printable ASCII", `limit "empty": Capacity`, "Jitter", "Timeout"} {
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("all at once: got %v, want %q in it", err, want)
		}
	}
	for line := range strings.Lines(fmt.Sprint(err)) {
		if !strings.HasPrefix(line, "httplimit: ") {
			t.Errorf("the line %q has another prefix", line)
		}
	}
	if _, err := httplimit.New(nil, &httplimit.Config{Policies: good}); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("no store: got %v, want ErrInvalid", err)
	}
}

func TestGrantsThenRefuses(t *testing.T) {
	clock := newClock()
	m := newMiddleware(t, memstore.New(clock.Now), httplimit.Config{Policies: []httplimit.Policy{
		{Limit: perMinute, Key: byUser}, {Limit: perDay},
	}})
	next := &answering{status: http.StatusCreated}
	h := m.Handler(next)
	const policy = `"per_minute";q=3;w=18, "per_day";q=4;w=86400`
	for _, step := range []struct {
		after      time.Duration // the step before
		user       string
		status     int
		limits     string
		retryAfter string
		violated   string
	}{
		{0, "ann", 201, `"per_minute";r=2;t=6, "per_day";r=3;t=86400`, "", ""},
		{0, "ann", 201, `"per_minute";r=1;t=6, "per_day";r=2;t=86400`, "", ""},
		{500 * time.Millisecond, "ann", 201, `"per_minute";r=0;t=6, "per_day";r=1;t=86400`, "", ""},
		{0, "ann", 429, `"per_minute";r=0;t=6`, "6", "[per_minute]"},
		{5 * time.Second, "ann", 429, `"per_minute";r=0;t=1`, "1", "[per_minute]"},
		{0, "bob", 201, `"per_minute";r=2;t=6, "per_day";r=0;t=86395`, "", ""},
		{0, "bob", 429, `"per_day";r=0;t=86395`, "86395", "[per_day]"},
		{0, "ann", 429, `"per_minute";r=0;t=1, "per_day";r=0;t=86395`, "86395", "[per_minute per_day]"},
		{86395 * time.Second, "ann", 201, `"per_minute";r=2;t=6, "per_day";r=3;t=86400`, "", ""},
	} {
		clock.add(step.after)
		resp := serve(h, get("/", "X-User", step.user))
		wantStatus(t, resp, step.status)
		wantHeader(t, resp, "RateLimit-Policy", policy)
		wantHeader(t, resp, "RateLimit", step.limits)
		wantHeader(t, resp, "Retry-After", step.retryAfter)
		if step.status == 429 {
			p := readProblem(t, resp)
			if p.Type != "https://iana.org/assignments/http-problem-types#quota-exceeded" || fmt.Sprint(p.Violated) != step.violated {
				t.Errorf("got the problem %+v, want quota-exceeded of %s", p, step.violated)
			}
		}
		for _, name := range []string{"RateLimit", "RateLimit-Policy"} {
			if _, err := httpsfv.UnmarshalList(resp.Header.Values(name)); err != nil {
				t.Errorf("%s does not parse: %v", name, err)
			}
		}
	}
	if next.served.Load() != 5 {
		t.Errorf("the handler served %d requests, want 5", next.served.Load())
	}
}

func TestFieldsByOption(t *testing.T) {
	for _, test := range []struct {
		fields httplimit.Fields
		want   string
	}{
		{0, `RateLimit="l \"1\\";r=2;t=6 RateLimit-Policy="l \"1\\";q=3;w=18`},
		{httplimit.Draft11, `RateLimit="l \"1\\";r=2;t=6 RateLimit-Policy="l \"1\\";q=3;w=18`},
		{httplimit.Triple, `RateLimit-Limit=3 RateLimit-Remaining=2 RateLimit-Reset=6`},
		{httplimit.Draft11 | httplimit.Triple, `RateLimit="l \"1\\";r=2;t=6 RateLimit-Limit=3 RateLimit-Policy="l \"1\\";q=3;w=18 RateLimit-Remaining=2 RateLimit-Reset=6`},
		{httplimit.NoFields, ``},
	} {
		limit := perMinute
		limit.Name = `l "1\`
		m := newMiddleware(t, memstore.New(newClock().Now), httplimit.Config{Policies: []httplimit.Policy{{Limit: limit}}, Fields: test.fields})
		resp := serve(m.Handler(&answering{}), get("/"))
		var got []string
		for _, name := range []string{"RateLimit", "RateLimit-Limit", "RateLimit-Policy", "RateLimit-Remaining", "RateLimit-Reset"} {
			if v := resp.Header.Get(name); v != "" {
				got = append(got, name+"="+v)
			}
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("fields %d: got %q, want %q", test.fields, got, test.want)
		}
	}
}

// The effective window of a full limit, one in debt, one that is paused, and one of slots.
func TestEffectiveWindow(t *testing.T) {
	clock := newClock()
	store := memstore.New(clock.Now)
	slots := ratelimit.SlidingWindow{Name: "slots", Rate: 3, Period: time.Minute, Slots: 6, Start: noon}
	m := newMiddleware(t, store, httplimit.Config{Policies: []httplimit.Policy{{Limit: perMinute}, {Limit: perDay}, {Limit: slots}}})
	want := func(verb func(context.Context, ...ratelimit.Request) (ratelimit.Result, error), field string, requests ...ratelimit.Request) {
		t.Helper()
		result, err := verb(t.Context(), requests...)
		must(t, err)
		w := httptest.NewRecorder()
		m.Granted(w, get("/"), result)
		m.Answer(w, get("/"), result.Err())
		if got := w.Header().Values("RateLimit"); !slices.Equal(got, []string{field}) {
			t.Errorf("got %q, want %q", got, field)
		}
	}
	want(store.Check, `"per_minute";r=3;t=6, "per_day";r=4;t=86400`, perMinute.For(""), perDay.For(""))
	want(store.Reserve, `"per_minute";r=0;t=18`, perMinute.ForN("", 5))
	want(store.Allow, `"per_minute";r=0;t=15`, perMinute.ForN("", 0.5))
	want(store.Allow, `"per_day";r=3;t=86400`, perDay.ForN("", 1))
	for _, l := range []ratelimit.Limit{perMinute, perDay} {
		must(t, errOf(store.Pause(t.Context(), l, "paused", time.Hour)))
	}
	want(store.Allow, `"per_minute";r=0;t=3606`, perMinute.For("paused"))
	result, err := store.Allow(t.Context(), perDay.For("paused"))
	must(t, err)
	want(store.Allow, fmt.Sprintf(`"per_day";r=0;t=%d`, int(math.Ceil(result.RetryAfter.Seconds()))), perDay.For("paused"))

	// The window of a sliding window ends where its next slot begins.
	want(store.Check, `"slots";r=3;t=60`, slots.For(""))
	clock.add(6 * time.Second)
	want(store.Allow, `"slots";r=2;t=4`, slots.For(""))
	clock.add(4 * time.Second)
	want(store.Check, `"slots";r=2;t=10`, slots.For(""))
	must(t, errOf(store.Pause(t.Context(), slots, "", 25*time.Second)))
	want(store.Check, `"slots";r=2;t=25`, slots.For(""))
}

// The fields of a quota by the calendar tell its true reset: the customer's midnight, an hour
// earlier where summer time has begun meanwhile. Who waits until then gets through, and nobody
// does before.
func TestFieldsOfAQuota(t *testing.T) {
	clock := newClock()
	store := memstore.New(clock.Now)
	quota := ratelimit.FixedWindow{
		Name: "quota", Rate: 3, Every: ratelimit.Month, Zone: "Europe/Berlin",
		Anchor: ratelimit.Date{Year: 2026, Month: time.January, Day: 31},
	}
	m := newMiddleware(t, store, httplimit.Config{
		Policies: []httplimit.Policy{{Limit: quota}}, Fields: httplimit.Draft11 | httplimit.Triple, Limits: true,
	})
	h := m.Handler(&answering{})
	wantFields := func(status int, policy, limit, reset, retry string) {
		t.Helper()
		resp := serve(h, get("/"))
		wantStatus(t, resp, status)
		wantHeader(t, resp, "RateLimit-Policy", policy)
		wantHeader(t, resp, "RateLimit", limit)
		wantHeader(t, resp, "RateLimit-Reset", reset)
		wantHeader(t, resp, "Retry-After", retry)
	}
	const spring = `"quota";q=3;w=2674800` // 31 days less an hour
	clock.set(time.Date(2026, 3, 10, 12, 0, 0, 0, time.UTC))
	wantFields(200, spring, `"quota";r=2;t=1764000`, "1764000", "")
	clock.set(time.Date(2026, 3, 28, 22, 0, 0, 0, time.UTC)) // summer time begins in three hours
	wantFields(200, spring, `"quota";r=1;t=172800`, "172800", "")
	wantFields(200, spring, `"quota";r=0;t=172800`, "172800", "")
	wantFields(429, spring, `"quota";r=0;t=172800`, "172800", "172800")
	edge := time.Date(2026, 3, 30, 22, 0, 0, 0, time.UTC)
	clock.set(edge.Add(-time.Microsecond))
	wantFields(429, spring, `"quota";r=0;t=1`, "1", "1")
	clock.set(edge)
	wantFields(200, `"quota";q=3;w=2592000`, `"quota";r=2;t=2592000`, "2592000", "")

	must(t, errOf(store.Pause(t.Context(), quota, "", time.Hour)))
	wantFields(429, `"quota";q=3;w=2592000`, `"quota";r=2;t=3600`, "3600", "3600")
	clock.add(time.Hour)
	wantFields(200, `"quota";q=3;w=2592000`, `"quota";r=1;t=2588400`, "2588400", "")

	quota.Anchor.Day = 15 // the first 15th does not count
	h = newMiddleware(t, store, httplimit.Config{
		Policies: []httplimit.Policy{{Limit: quota}}, Fields: httplimit.Draft11 | httplimit.Triple, Limits: true,
	}).Handler(&answering{})
	until := fmt.Sprint(int(time.Date(2026, 5, 14, 22, 0, 0, 0, time.UTC).Sub(clock.Now()).Seconds()))
	wantFields(200, `"quota";q=3;w=2674800`, `"quota";r=0;t=`+until, until, "")
}

// Routes of one limit that leave a share of it to others are refused by what is left for them.
func TestAbove(t *testing.T) {
	clock := newClock()
	store := memstore.New(clock.Now)
	limit := ratelimit.TokenBucket{Name: "api", Rate: 1, Period: time.Second, Capacity: 10}
	route := func(above float64) http.Handler {
		return newMiddleware(t, store, httplimit.Config{Policies: []httplimit.Policy{{Limit: limit, Above: above}}}).Handler(&answering{})
	}
	batch, normal, critical := route(0.5), route(0.2), route(0)
	wantRemaining := func(h http.Handler, status int, limit, retry string) {
		t.Helper()
		resp := serve(h, get("/"))
		wantStatus(t, resp, status)
		wantHeader(t, resp, "RateLimit", limit)
		wantHeader(t, resp, "Retry-After", retry)
	}
	for left := 4; left >= 0; left-- {
		wantRemaining(batch, 200, fmt.Sprintf(`"api";r=%d;t=1`, left), "")
	}
	wantRemaining(batch, 429, `"api";r=0;t=1`, "1")
	for left := 2; left >= 0; left-- {
		wantRemaining(normal, 200, fmt.Sprintf(`"api";r=%d;t=1`, left), "")
	}
	wantRemaining(normal, 429, `"api";r=0;t=1`, "1")
	wantRemaining(critical, 200, `"api";r=1;t=1`, "")
	wantRemaining(batch, 429, `"api";r=0;t=1`, "5") // one is left, and it needs six
	clock.add(5 * time.Second)
	wantRemaining(batch, 200, `"api";r=0;t=1`, "")
}

// Middlewares around each other add to the fields, and the one that refuses decides.
func TestNested(t *testing.T) {
	store := memstore.New(newClock().Now)
	outer := newMiddleware(t, store, httplimit.Config{Policies: []httplimit.Policy{{Limit: perDay}}})
	inner := newMiddleware(t, store, httplimit.Config{Policies: []httplimit.Policy{{Limit: perMinute}}})
	h := outer.Handler(inner.Handler(&answering{}))
	resp := serve(h, get("/"))
	list, err := httpsfv.UnmarshalList(resp.Header.Values("RateLimit"))
	if err != nil || len(list) != 2 {
		t.Errorf("got %d limits, %v, in %q, want 2", len(list), err, resp.Header.Values("RateLimit"))
	}
	for range 2 {
		wantStatus(t, serve(h, get("/")), 200)
	}
	resp = serve(h, get("/"))
	wantViolated(t, resp, "per_minute")
}

func TestKeysAreNotTold(t *testing.T) {
	const key = "zoe@example.org"
	m := newMiddleware(t, memstore.New(newClock().Now), httplimit.Config{
		Policies:        []httplimit.Policy{{Limit: perMinute, Key: byUser, Cost: httplimit.CostFromQuery("n", 1, 1)}},
		PartitionSecret: []byte("a secret of the service"),
	})
	h := m.Handler(&answering{})
	var partitions []string
	for _, r := range []*http.Request{
		get("/", "X-User", key), get("/?n=3", "X-User", key), get("/?n=9", "X-User", key),
		get("/", "X-User", key+"\xff"), get("/", "X-User", strings.Repeat(key, 200)), get("/", "X-User", "bob"),
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		var wire strings.Builder
		must(t, w.Result().Write(&wire))
		if strings.Contains(wire.String(), "zoe") {
			t.Errorf("the response holds the key:\n%s", &wire)
		}
		if list, err := httpsfv.UnmarshalList(w.Result().Header.Values("RateLimit")); err == nil && len(list) == 1 {
			pk, _ := list[0].(httpsfv.Item).Params.Get("pk")
			partitions = append(partitions, fmt.Sprintf("%x", pk))
		}
	}
	if len(partitions) != 3 || partitions[0] != partitions[1] || partitions[0] == partitions[2] || len(partitions[0]) != 24 {
		t.Errorf("got the partition keys %q, want two the same, and another", partitions)
	}
}

func TestTier(t *testing.T) {
	premium := perMinute
	premium.Capacity = 100
	renamed := premium
	renamed.Name = "premium"
	m := newMiddleware(t, memstore.New(newClock().Now), httplimit.Config{Policies: []httplimit.Policy{{
		Limit: perMinute,
		Key:   byUser,
		Tier: func(r *http.Request) (ratelimit.Limit, error) {
			switch r.Header.Get("X-Plan") {
			case "premium":
				return premium, nil
			case "internal":
				return nil, nil
			case "wrong":
				return renamed, nil
			case "unpaid":
				return nil, &httplimit.RequestError{Status: http.StatusPaymentRequired, Detail: "the plan is not paid"}
			}
			return perMinute, nil
		},
	}}})
	h := m.Handler(&answering{})
	for _, test := range []struct {
		plan   string
		status int
		policy string
	}{
		{"free", 200, `"per_minute";q=3;w=18`},
		{"premium", 200, `"per_minute";q=100;w=600`},
		{"internal", 200, ""},
		{"wrong", 503, ""},
		{"unpaid", 402, ""},
	} {
		resp := serve(h, get("/", "X-User", test.plan, "X-Plan", test.plan))
		wantStatus(t, resp, test.status)
		wantHeader(t, resp, "RateLimit-Policy", test.policy)
	}
}

// A client that waits exactly as long as Retry-After says gets through the first time,
// whatever the kind of the limit.
func TestRetryAfterIsKept(t *testing.T) {
	clock := newClock()
	keepRetryAfter(t, memstore.New(clock.Now), clock, 1000)
}

// keepRetryAfter has clients use their limits up, wait, and come back.
func keepRetryAfter(t *testing.T, store httplimit.Store, clock *clock, clients int) {
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "bucket", Rate: 7, Period: 61 * time.Second, Capacity: 3},
		ratelimit.TokenBucket{Name: "fast", Rate: 333, Period: time.Second, Capacity: 2},
		ratelimit.FixedWindow{Name: "window", Rate: 3, Period: 17 * time.Second},
		ratelimit.SlidingWindow{Name: "sliding", Rate: 3, Period: 17 * time.Second, Slots: 7},
		ratelimit.FixedWindow{Name: "long", Rate: 2.5, Period: 1234567 * time.Microsecond, Capacity: 4},
	}
	through := 0
	for i := range clients {
		m := newMiddleware(t, store, httplimit.Config{
			Policies: []httplimit.Policy{{Limit: limits[i%len(limits)], Key: byUser}},
			Jitter:   float64(i%3) / 4,
		})
		next := &answering{}
		h, user := m.Handler(next), strconv.Itoa(i)
		clock.add(time.Duration(i) * 1777 * time.Microsecond)
		resp := serve(h, get("/", "X-User", user))
		for ; resp.StatusCode == 200; resp = serve(h, get("/", "X-User", user)) {
		}
		wantStatus(t, resp, 429)
		wait, err := strconv.Atoi(resp.Header.Get("Retry-After"))
		if err != nil || wait < 1 {
			t.Fatalf("got Retry-After %q, want whole seconds", resp.Header.Get("Retry-After"))
		}
		clock.add(time.Duration(wait) * time.Second)
		if serve(h, get("/", "X-User", user)).StatusCode == 200 {
			through++
		}
	}
	if through != clients {
		t.Errorf("%d of %d clients got through the first time, want all", through, clients)
	}
	t.Logf("%d of %d clients that waited exactly Retry-After got through the first time", through, clients)
}

// A share of a day's wait would send a customer away for hours: jitter is at most half a minute,
// or as much as the caller says.
func TestJitterIsBounded(t *testing.T) {
	day := ratelimit.FixedWindow{Name: "day", Rate: 1, Period: 24 * time.Hour, Start: noon}
	for _, most := range []time.Duration{0, 2 * time.Hour} {
		clock := newClock()
		h := newMiddleware(t, memstore.New(clock.Now), httplimit.Config{
			Policies: []httplimit.Policy{{Limit: day, Key: byUser}}, Jitter: 0.1, MaxJitter: most,
		}).Handler(&answering{})
		latest := time.Duration(0)
		for i := range 100 {
			user := strconv.Itoa(i)
			wantStatus(t, serve(h, get("/", "X-User", user)), 200)
			wait, err := strconv.Atoi(serve(h, get("/", "X-User", user)).Header.Get("Retry-After"))
			must(t, err)
			latest = max(latest, time.Duration(wait)*time.Second-day.Period)
		}
		if want := max(most, 30*time.Second); latest > want || latest < want*9/10 {
			t.Errorf("MaxJitter %v: a client is told to come %v after midnight, want nearly %v and no later", most, latest, want)
		}
	}
}

func TestFailure(t *testing.T) {
	for _, open := range []bool{false, true} {
		var events []ratelimit.Event
		var log bytes.Buffer
		m := newMiddleware(t, failing{}, httplimit.Config{
			Policies: []httplimit.Policy{{Limit: perMinute}}, FailOpen: open, Logger: slog.New(slog.NewTextHandler(&log, nil)),
			Observe: func(_ context.Context, e ratelimit.Event) { events = append(events, e) },
		})
		next := &answering{}
		resp := serve(m.Handler(next), get("/"))
		if !open {
			wantStatus(t, resp, 503)
			wantRetryAfter(t, resp, 5, 10)
			if p := readProblem(t, resp); strings.Contains(p.Detail, "database") {
				t.Errorf("the client is told of the database: %q", p.Detail)
			}
		}
		if served := next.served.Load() == 1; served != open || len(events) != 1 {
			t.Fatalf("fail open %v: served %v, %d events, want one", open, served, len(events))
		}
		if text := log.String(); !strings.Contains(text, "the limit could not be asked") || !strings.Contains(text, "policy=per_minute") || !strings.Contains(text, errDatabase.Error()) {
			t.Errorf("fail open %v: logged %q", open, text)
		}
		if e := events[0]; e.Policy() != "per_minute" || e.Door != "httplimit" || e.Outcome != ratelimit.OutcomeFailed || e.Passed != open || e.ErrorClass != "other" || !errors.Is(e.Err, errDatabase) {
			t.Errorf("fail open %v: told as %+v, want a failure of the policy", open, e)
		}
	}
}

// A database that does not answer does not hang requests.
func TestTimeout(t *testing.T) {
	store := failing{release: make(chan struct{})}
	defer close(store.release)
	m := newMiddleware(t, store, httplimit.Config{Policies: []httplimit.Policy{{Limit: perMinute}}, Timeout: 10 * time.Millisecond})
	wantStatus(t, serve(m.Handler(&answering{}), get("/")), 503)
}

// A client that goes while the store is asked does not open what fails open.
func TestGoneIsNotLetThrough(t *testing.T) {
	store := failing{release: make(chan struct{})}
	defer close(store.release)
	m := newMiddleware(t, store, httplimit.Config{Policies: []httplimit.Policy{{Limit: perMinute}}, FailOpen: true})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	next := &answering{}
	serve(m.Handler(next), get("/").WithContext(ctx))
	if next.served.Load() != 0 {
		t.Error("the handler ran for a client that has gone")
	}
}

func TestShadow(t *testing.T) {
	store := memstore.New(newClock().Now)
	var decisions []ratelimit.Outcome
	m := newMiddleware(t, store, httplimit.Config{
		Policies: []httplimit.Policy{{Limit: perMinute, Cost: httplimit.CostFromQuery("n", 1, 1)}},
		Shadow:   true,
		Observe: func(ctx context.Context, e ratelimit.Event) {
			if !e.Shadow || !e.Passed {
				t.Errorf("got %+v, want a request that passes in shadow mode", e)
			}
			if r := httplimit.RequestOf(ctx); e.Policy() != "per_minute" || e.Door != "httplimit" || r == nil || r.URL.Path != "/" || httplimit.RequestOf(r.Context()) != nil {
				t.Errorf("of %v got %+v, want the policy's name", r, e)
			}
			decisions = append(decisions, e.Outcome)
		},
	})
	next := &answering{}
	h := m.Handler(next)
	for _, query := range []string{"", "?n=2", "", "?n=4", "?n=-1"} {
		resp := serve(h, get("/"+query))
		wantStatus(t, resp, 200)
		wantHeader(t, resp, "RateLimit", "")
		wantHeader(t, resp, "Retry-After", "")
	}
	want := []ratelimit.Outcome{ratelimit.OutcomeGranted, ratelimit.OutcomeGranted, ratelimit.OutcomeRefused, ratelimit.OutcomeTooLarge, ratelimit.OutcomeInvalid}
	if !slices.Equal(decisions, want) || next.served.Load() != 5 {
		t.Errorf("got %v, and %d requests served, want %v, and 5", decisions, next.served.Load(), want)
	}
	if got := left(t, store, perMinute, ""); got != 0 {
		t.Errorf("%g tokens are left, want 0: shadow mode takes them", got)
	}
}

// A program can write all answers in its own way, or those to some requests.
func TestWriteProblem(t *testing.T) {
	write := func(w http.ResponseWriter, r *http.Request, p *httplimit.Problem) {
		if r.URL.Path == "/problem" {
			p.Write(w)
			return
		}
		w.WriteHeader(p.Status)
		fmt.Fprintf(w, "%d %v %v %v", p.Status, p.RetryAfter, p.Violated, errors.Is(p.Event.Err, errDatabase))
	}
	config := httplimit.Config{Policies: []httplimit.Policy{{Limit: perMinute, Cost: httplimit.CostFromQuery("n", 1, 1)}}, WriteProblem: write}
	granting := newMiddleware(t, memstore.New(newClock().Now), config).Handler(&answering{})
	broken := newMiddleware(t, failing{}, config).Handler(&answering{})
	for range 3 {
		wantStatus(t, serve(granting, get("/")), 200)
	}
	for _, test := range []struct {
		handler http.Handler
		target  string
		want    string
		fields  bool
	}{
		{granting, "/", "429 6s [per_minute] false", true},
		{granting, "/?n=100", "422 0s [] false", false},
		{granting, "/?n=x", "400 0s [] false", false},
		{broken, "/", "503 ", false},
	} {
		w := httptest.NewRecorder()
		test.handler.ServeHTTP(w, get(test.target))
		if !strings.HasPrefix(w.Body.String(), test.want) || (w.Header().Get("RateLimit") != "") != test.fields {
			t.Errorf("%s: got %q, %v, want %q", test.target, w.Body, w.Header(), test.want)
		}
		if after, waits := w.Header().Get("Retry-After"), w.Code == 429 || w.Code == 503; (after != "") != waits {
			t.Errorf("%s: got Retry-After %q", test.target, after)
		} else if waits && !strings.Contains(w.Body.String(), " "+after+"s ") {
			t.Errorf("%s: got %q with Retry-After %s", test.target, w.Body, after)
		}
	}
	if p := readProblem(t, serve(granting, get("/problem"))); p.Status != 429 || len(p.Violated) != 1 {
		t.Errorf("got %+v, want the problem as ever", p)
	}
}

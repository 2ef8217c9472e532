package grpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/grpclimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

func TestRefusesWithRetryInfo(t *testing.T) {
	inEach(t, func(t *testing.T, store fullStore) {
		e := &echo{}
		limit := newLimiter(t, store, grpclimit.Config{Policies: []grpclimit.Policy{{Limit: perMinute, Key: byUser}, {Limit: perHour, Key: byUser}}})
		conn := dial(t, e, limit)
		for range 2 {
			wantCode(t, say(as(t, "ann"), conn, "hello"), codes.OK)
		}
		if n, err := count(as(t, "ann"), conn, "hello"); n != 1 || err != nil {
			t.Errorf("a stream: got %d messages, %v", n, err)
		}
		var trailer metadata.MD
		err := say(as(t, "ann"), conn, "hello", grpc.Trailer(&trailer))
		wantCode(t, err, codes.ResourceExhausted)
		violated, again := told(err)
		if fmt.Sprint(violated) != "[per_minute]" || again <= 0 || again > 6*time.Second {
			t.Errorf("refused by %v for %v, want per_minute for at most 6 s", violated, again)
		}
		if ms, err := strconv.Atoi(strings.Join(trailer.Get("grpc-retry-pushback-ms"), "")); err != nil || time.Duration(ms)*time.Millisecond < again {
			t.Errorf("the trailer says %d ms, %v, RetryInfo %v", ms, err, again)
		}
		_, err = count(as(t, "ann"), conn, "hello")
		wantCode(t, err, codes.ResourceExhausted)
		if strings.Contains(fmt.Sprint(err), "ann") {
			t.Errorf("the answer names the key: %v", err)
		}
		wantLeft(t, store, perHour.For("ann"), 1)
		wantCode(t, say(as(t, "bob"), conn, "hello"), codes.OK)
		if got := e.calls.Load(); got != 4 {
			t.Errorf("%d calls were handled, want 4", got)
		}
	})
}

func TestAnswers(t *testing.T) {
	known, err := catalog.NewInMemory(&catalog.Config{Logger: discardLogs})
	must(t, err)
	must(t, known.Publish(t.Context(), perMinute))
	must(t, errOf(known.Set(t.Context(), perMinute.Name, "zoe", catalog.Override{Mode: ratelimit.ModeRefuse})))
	var heard []ratelimit.Event
	limit := newLimiter(t, memstore.New(nil), grpclimit.Config{
		Policies: []grpclimit.Policy{{
			Limit: perMinute,
			Key:   byUser,
			Cost: func(c *grpclimit.Call) (float64, error) {
				text := c.Message.(*wrapperspb.StringValue).GetValue()
				if text == "broken" {
					return 0, errDatabase
				}
				return strconv.ParseFloat(text, 64)
			},
			Tier: func(c *grpclimit.Call) (ratelimit.Limit, error) {
				if metadata.ValueFromIncomingContext(c.Context, "x-user")[0] == "eve" {
					return nil, status.Error(codes.PermissionDenied, "no plan")
				}
				return perMinute, nil
			},
		}},
		Catalog: known,
		Observe: func(ctx context.Context, e ratelimit.Event) {
			if c := grpclimit.CallOf(ctx); c == nil || c.Method != sayMethod || grpclimit.CallOf(c.Context) != nil || e.Door != "grpclimit" || e.Policy() != "per_minute" {
				t.Errorf("of %v heard %+v", c, e)
			}
			heard = append(heard, e)
		},
	})
	conn := dial(t, &echo{}, limit)
	for _, step := range []struct {
		user, cost string
		code       codes.Code
		decision   ratelimit.Outcome
	}{
		{"ann", "2", codes.OK, ratelimit.OutcomeGranted},
		{"ann", "2", codes.ResourceExhausted, ratelimit.OutcomeRefused},
		{"ann", "4", codes.InvalidArgument, ratelimit.OutcomeTooLarge},
		{"ann", "1e300", codes.InvalidArgument, ratelimit.OutcomeTooLarge},
		{"ann", "-1", codes.InvalidArgument, ratelimit.OutcomeInvalid},
		{"ann", "NaN", codes.InvalidArgument, ratelimit.OutcomeInvalid},
		{"ann", "broken", codes.Unavailable, ratelimit.OutcomeFailed},
		{"eve", "1", codes.PermissionDenied, ratelimit.OutcomeInvalid},
		{"zoe", "1", codes.ResourceExhausted, ratelimit.OutcomeRefused}, // by the catalog's mode
		{strings.Repeat("k", ratelimit.MaxKeyLength+1), "1", codes.InvalidArgument, ratelimit.OutcomeInvalid},
		{"ann", "1", codes.OK, ratelimit.OutcomeGranted},
	} {
		err := say(as(t, step.user), conn, step.cost)
		wantCode(t, err, step.code)
		if _, again := told(err); (again >= 0) != (step.code == codes.ResourceExhausted || step.code == codes.Unavailable) {
			t.Errorf("%s of %s: RetryInfo %v", step.cost, step.user, again)
		}
		if byMode := strings.Contains(fmt.Sprint(status.Convert(err).Details()), "refused by its mode"); byMode != (step.user == "zoe") {
			t.Errorf("%s: refused by its mode: %t", step.user, byMode)
		}
		if last := heard[len(heard)-1]; last.Outcome != step.decision {
			t.Errorf("%s of %.9s: heard %v, want %v", step.cost, step.user, last, step.decision)
		}
	}
	if len(heard) != 11 {
		t.Errorf("heard of %d calls, want 11", len(heard))
	}
}

// A RetryInfo holds: of clients that wait that long, all get through, also with jitter.
func TestRetryInfoIsKept(t *testing.T) {
	now := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	var mu sync.Mutex
	clock := func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return now
	}
	limit := newLimiter(t, memstore.New(clock), grpclimit.Config{
		Policies: []grpclimit.Policy{{Limit: perMinute, Key: byUser}, {Limit: ratelimit.SlidingWindow{Name: "sliding", Rate: 5, Period: time.Hour}, Key: byUser}},
		Jitter:   0.1,
	})
	conn := dial(t, &echo{}, limit)
	for n := range 200 {
		user := strconv.Itoa(n % 7)
		err := say(as(t, user), conn, "hello")
		if err == nil {
			continue
		}
		_, again := told(err)
		mu.Lock()
		now = now.Add(again)
		mu.Unlock()
		if err := say(as(t, user), conn, "hello"); err != nil {
			t.Errorf("after the wait of %v: %v", again, err)
		}
	}
}

// Without the database there is no yes, but with FailOpen or Shadow.
func TestStoreFails(t *testing.T) {
	config := grpclimit.Config{Policies: []grpclimit.Policy{{Limit: perMinute}}}
	open, shadow := config, config
	open.FailOpen, shadow.Shadow = true, true
	for _, config := range []grpclimit.Config{config, open, shadow} {
		e := &echo{}
		conn := dial(t, e, newLimiter(t, failing{memstore.New(nil)}, config))
		err := say(t.Context(), conn, "hello")
		_, streamed := count(t.Context(), conn, "hello")
		want, handled := codes.Unavailable, int64(0)
		if config.FailOpen || config.Shadow {
			want, handled = codes.OK, 2
		}
		wantCode(t, err, want)
		wantCode(t, streamed, want)
		if got := e.calls.Load(); got != handled {
			t.Errorf("fail open %v, shadow %v: %d calls were handled, want %d", config.FailOpen, config.Shadow, got, handled)
		}
		if _, again := told(err); want != codes.OK && (again < 5*time.Second || again > 10*time.Second) {
			t.Errorf("RetryInfo %v, want 5 to 10 s", again)
		}
	}
}

func TestCancelled(t *testing.T) {
	var heard ratelimit.Event
	limit := newLimiter(t, failing{memstore.New(nil)}, grpclimit.Config{
		Policies: []grpclimit.Policy{{Limit: perMinute}}, FailOpen: true,
		Observe: func(_ context.Context, e ratelimit.Event) { heard = e },
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := limit.Unary(ctx, nil, &grpc.UnaryServerInfo{FullMethod: sayMethod}, func(context.Context, any) (any, error) {
		t.Error("a call that was given up is let through, since its leaving failed the store")
		return nil, nil
	})
	wantCode(t, err, codes.Canceled)
	if heard.Passed || heard.Outcome != ratelimit.OutcomeFailed {
		t.Errorf("heard %v", heard)
	}
}

func TestMethods(t *testing.T) {
	store := memstore.New(nil)
	one := func(name string) ratelimit.TokenBucket {
		return ratelimit.TokenBucket{Name: name, Rate: 1, Period: time.Hour}
	}
	limit := newLimiter(t, store, grpclimit.Config{Policies: []grpclimit.Policy{
		{Limit: one("say"), Applies: grpclimit.Methods(sayMethod)},
		{Limit: one("other"), Applies: grpclimit.Methods("/test.Ech/", "/test.Echo")},
		{Limit: one("by_method"), Applies: grpclimit.Methods("/test.Echo/"), Key: grpclimit.ByMethod},
	}})
	conn := dial(t, &echo{}, limit)
	wantCode(t, say(t.Context(), conn, "hello"), codes.OK)
	_, err := count(t.Context(), conn, "hello")
	wantCode(t, err, codes.OK)
	err = say(t.Context(), conn, "hello")
	if violated, _ := told(err); fmt.Sprint(violated) != "[say by_method]" {
		t.Errorf("refused by %v, %v", violated, err)
	}
	wantLeft(t, store, one("other").For(""), 1)
}

func TestKeys(t *testing.T) {
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("x-user", "ann", "x-twice", "a", "x-twice", "b", "x-empty", ""))
	call := &grpclimit.Call{Method: sayMethod, Context: ctx}
	constant := func(k string) grpclimit.Key { return func(*grpclimit.Call) (string, error) { return k, nil } }
	broken := func(*grpclimit.Call) (string, error) { return "", errDatabase }
	subject := func(s string) grpclimit.Key {
		return grpclimit.BySubject(func(context.Context) string { return s })
	}
	for name, test := range map[string]struct {
		key  grpclimit.Key
		want string
		code codes.Code
	}{
		"all":                    {grpclimit.ForAll, "", codes.OK},
		"metadata":               {grpclimit.ByMetadata("X-User"), "ann", codes.OK},
		"metadata given twice":   {grpclimit.ByMetadata("x-twice"), "", codes.InvalidArgument},
		"metadata that is empty": {grpclimit.ByMetadata("x-empty"), "", codes.InvalidArgument},
		"no metadata":            {grpclimit.ByMetadata("x-none"), "", codes.InvalidArgument},
		"subject":                {subject("bob"), "bob", codes.OK},
		"no subject":             {subject(""), "", codes.Unauthenticated},
		"method":                 {grpclimit.ByMethod, sayMethod, codes.OK},
		"joined":                 {grpclimit.Join(constant("a"), constant("b")), ratelimit.Key("a", "b"), codes.OK},
		"first":                  {grpclimit.FirstOf(subject(""), byUser), ratelimit.Key("1", "ann"), codes.OK},
		"first of none":          {grpclimit.FirstOf(), "", codes.InvalidArgument},
		"first that fails":       {grpclimit.FirstOf(broken, byUser), "", codes.Unknown},
	} {
		got, err := test.key(call)
		if status.Code(err) != test.code || got != test.want {
			t.Errorf("%s: got %q, %v, want %q, %v", name, got, err, test.want, test.code)
		}
	}
	if a, _ := grpclimit.Hashed(byUser)(call); len(a) != 43 || strings.Contains(a, "ann") {
		t.Errorf("hashed: got %q", a)
	}
}

// A client cannot choose its address by metadata, unless a trusted proxy passes it on.
func TestSpoofedAddresses(t *testing.T) {
	trusted, err := grpclimit.NewAddresses(&grpclimit.AddressConfig{Trusted: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, UnixSocket: true})
	must(t, err)
	none, err := grpclimit.NewAddresses(nil)
	must(t, err)
	tcp := func(ip string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: 1234} }
	for _, test := range []struct {
		name      string
		addresses *grpclimit.Addresses
		peer      net.Addr
		forwarded []string
		want      string
	}{
		{"no proxy", none, tcp("192.0.2.1"), []string{"198.51.100.1"}, "192.0.2.1/32"},
		{"the proxy", trusted, tcp("10.0.0.1"), []string{"198.51.100.1"}, "198.51.100.1/32"},
		{"in values of their own", trusted, tcp("10.0.0.1"), []string{"198.51.100.1", "192.0.2.9", "10.0.0.2"}, "192.0.2.9/32"},
		{"IPv6", none, tcp("2001:db8::1"), nil, "2001:db8::/64"},
		{"a socket", trusted, &net.UnixAddr{Name: "@", Net: "unix"}, []string{"192.0.2.9"}, "192.0.2.9/32"},
		{"a socket that is not trusted", none, &net.UnixAddr{Name: "@", Net: "unix"}, []string{"192.0.2.9"}, ""},
		{"no peer", none, nil, []string{"192.0.2.9"}, ""},
	} {
		ctx := metadata.NewIncomingContext(t.Context(), metadata.MD{"x-forwarded-for": test.forwarded})
		if test.peer != nil {
			ctx = peer.NewContext(ctx, &peer.Peer{Addr: test.peer})
		}
		got, err := test.addresses.Key(&grpclimit.Call{Context: ctx})
		if got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("%s: got %q, %v, want %q", test.name, got, err, test.want)
		}
	}
	if _, err := grpclimit.NewAddresses(&grpclimit.AddressConfig{IPv4Bits: 33}); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), "grpclimit: IPv4Bits") {
		t.Errorf("got %v, want ErrInvalid", err)
	}
}

func TestCountsByOutcome(t *testing.T) {
	store := memstore.New(nil)
	e := &echo{say: func(ctx context.Context, text string) error {
		switch text {
		case "free":
			if err := grpclimit.Used(ctx, "other", 1); !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("used of another policy: got %v", err)
			}
			return grpclimit.Used(ctx, "served", 0)
		case "panic":
			panic("of the handler")
		case "ok":
			return nil
		}
		return status.Error(codes.Unauthenticated, "no")
	}}
	failures := ratelimit.TokenBucket{Name: "failures", Rate: 5, Period: 1000 * time.Hour}
	served := ratelimit.TokenBucket{Name: "served", Rate: 5, Period: 1000 * time.Hour}
	conn := dial(t, e, newLimiter(t, store, grpclimit.Config{Policies: []grpclimit.Policy{
		{Limit: failures, Counts: grpclimit.CountOnly(codes.Unauthenticated)},
		{Limit: served, Counts: grpclimit.CountExcept(codes.Unauthenticated, codes.Unknown)},
	}}))
	for _, step := range []struct {
		text             string
		failures, served int64
	}{{"ok", 5, 4}, {"wrong", 4, 4}, {"panic", 3, 4}, {"free", 3, 4}, {"ok", 3, 3}} {
		say(t.Context(), conn, step.text)
		for limit, want := range map[ratelimit.Limit]int64{failures: step.failures, served: step.served} {
			wantLeft(t, store, limit.For(""), want)
		}
	}
}

func TestNewFindsFaults(t *testing.T) {
	good := []grpclimit.Policy{{Limit: perMinute}}
	for want, config := range map[string]*grpclimit.Config{
		"Config":            nil,
		"Policies":          {},
		"Jitter":            {Policies: good, Jitter: 2},
		"MaxJitter":         {Policies: good, MaxJitter: -1},
		"FailureRetryAfter": {Policies: good, FailureRetryAfter: -1},
		"FullRetryAfter":    {Policies: good, FullRetryAfter: -1},
		"two limits":        {Policies: good, InFlight: []grpclimit.InFlightPolicy{{Limit: ratelimit.InFlight{Name: "per_minute", Limit: 1}}}},
		"Permits":           {InFlight: []grpclimit.InFlightPolicy{{Limit: calls}}},
	} {
		if _, err := grpclimit.New(memstore.New(nil), config); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want ErrInvalid with %q", err, want)
		}
	}
	if _, err := grpclimit.New(nil, &grpclimit.Config{Policies: good}); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("no store: got %v", err)
	}
}

package httplimit_test

import (
	"errors"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
)

func constant(key string) httplimit.Key {
	return func(*http.Request) (string, error) { return key, nil }
}

func TestKeys(t *testing.T) {
	mux := http.NewServeMux()
	mux.Handle("GET /orders/{id}", &answering{})
	subject := httplimit.BySubject(func(r *http.Request) string { return r.Header.Get("Subject") })
	fails := func(*http.Request) (string, error) { return "", errDatabase }
	for _, test := range []struct {
		name   string
		key    httplimit.Key
		r      *http.Request
		want   string
		status int // of the RequestError
	}{
		{"all", httplimit.ForAll, get("/"), "", 0},
		{"header", byUser, get("/", "X-User", "ann"), "ann", 0},
		{"no header", byUser, get("/"), "", 400},
		{"empty header", byUser, get("/", "X-User", ""), "", 400},
		{"two headers", byUser, get("/", "X-User", "ann", "X-User", "bob"), "", 400},
		{"subject", subject, get("/", "Subject", "ann"), "ann", 0},
		{"no subject", subject, get("/"), "", 401},
		{"route", httplimit.ByRoute(mux), get("/orders/7"), "GET /orders/{id}", 0},
		{"no route", httplimit.ByRoute(mux), get("/nowhere"), "", 0},
		{"two parts", httplimit.Join(constant("a:b"), constant("c")), get("/"), `a\:b:c`, 0},
		{"two other parts", httplimit.Join(constant("a"), constant("b:c")), get("/"), `a:b\:c`, 0},
		{"a part is missing", httplimit.Join(constant("a"), byUser), get("/"), "", 400},
		{"the first part is missing", httplimit.Join(byUser, constant("a")), get("/"), "", 400},
		{"the first there is", httplimit.FirstOf(byUser, subject, constant("c")), get("/", "Subject", "ann"), "1:ann", 0},
		{"none there is", httplimit.FirstOf(byUser, subject), get("/"), "", 401},
		{"none of none", httplimit.FirstOf(), get("/"), "", 400},
		{"hashed", httplimit.Hashed(byUser), get("/", "X-User", "abc"), "ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0", 0},
		{"hashed, missing", httplimit.Hashed(byUser), get("/"), "", 400},
	} {
		got, err := test.key(test.r)
		var request *httplimit.RequestError
		status := 0
		if errors.As(err, &request) {
			status = request.Status
		}
		if got != test.want || status != test.status || (err == nil) != (test.status == 0) {
			t.Errorf("%s: got %q, %v, want %q, status %d", test.name, got, err, test.want, test.status)
		}
	}
	for name, key := range map[string]httplimit.Key{"first": httplimit.FirstOf(fails, constant("a")), "join": httplimit.Join(constant("a"), fails)} {
		if _, err := key(get("/")); !errors.Is(err, errDatabase) {
			t.Errorf("%s of a key that fails: got %v, want its error", name, err)
		}
	}
}

// What an override writes is what the door makes of a request.
func TestKeysOfOverrides(t *testing.T) {
	addresses, err := httplimit.NewAddresses(&httplimit.AddressConfig{IPv4Bits: 24})
	must(t, err)
	r := get("/", "X-User", "sk_live")
	r.RemoteAddr = "192.0.2.7:80"
	made := func(key httplimit.Key) string {
		t.Helper()
		k, err := key(r)
		must(t, err)
		return k
	}
	of, err := addresses.KeyOf(netip.MustParseAddr("192.0.2.9"))
	if want := made(addresses.Key); err != nil || of != want {
		t.Errorf("got %q, %v, want %q", of, err, want)
	}
	if got, want := httplimit.HashedKey("sk_live"), made(httplimit.Hashed(byUser)); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	none := httplimit.ByHeader("X-None")
	if got, want := httplimit.PlacedKey(1, of), made(httplimit.FirstOf(none, addresses.Key)); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if _, err := addresses.KeyOf(netip.Addr{}); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("no address: got %v", err)
	}
}

// A middleware around a handler sees the pattern by which it was routed.
func TestByRouteInside(t *testing.T) {
	var got string
	mux := http.NewServeMux()
	mux.HandleFunc("GET /orders/{id}", func(_ http.ResponseWriter, r *http.Request) {
		got, _ = httplimit.ByRoute(nil)(r)
	})
	serve(mux, get("/orders/7"))
	if got != "GET /orders/{id}" {
		t.Errorf("got %q", got)
	}
}

func TestNewAddressesFindsFaults(t *testing.T) {
	for name, config := range map[string]httplimit.AddressConfig{
		"Trusted[0]": {Trusted: []netip.Prefix{{}}},
		"IPv4Bits":   {IPv4Bits: 33},
		"IPv6Bits":   {IPv6Bits: -1},
	} {
		if _, err := httplimit.NewAddresses(&config); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), name) {
			t.Errorf("got %v, want ErrInvalid with %q", err, name)
		}
	}
}

// Proxies of our own are 10.0.0.0/8 and 2001:db8:ffff::/48; the client is 198.51.100.7,
// and says that it is others.
func TestSpoofedAddresses(t *testing.T) {
	const proxy, client = "10.0.0.1:5000", "198.51.100.7/32"
	const xff, fwd, real = "X-Forwarded-For", "Forwarded", "X-Real-Ip"
	for _, test := range []struct {
		name    string
		trusted string // the header that is
		from    string
		header  []string
		want    string
	}{
		{"no proxy", xff, "198.51.100.7:1234", nil, client},
		{"no proxy, but it says so", xff, "198.51.100.7:1234", []string{xff, "1.2.3.4"}, client},
		{"no proxy, and it says that it is ours", xff, "198.51.100.7:1234", []string{xff, "1.2.3.4, 10.0.0.1"}, client},
		{"one proxy", xff, proxy, []string{xff, "198.51.100.7"}, client},
		{"one proxy, another client in front", xff, proxy, []string{xff, "1.2.3.4, 198.51.100.7"}, client},
		{"two proxies, another client in front", xff, proxy, []string{xff, "1.2.3.4, 198.51.100.7, 10.0.0.2"}, client},
		{"in several lines", xff, proxy, []string{xff, "1.2.3.4", xff, "198.51.100.7", xff, "10.0.0.2"}, client},
		{"in several lines, the client's last", xff, proxy, []string{xff, "10.0.0.2", xff, "198.51.100.7"}, client},
		{"garbage in front", xff, proxy, []string{xff, "\x00,,;\", 198.51.100.7"}, client},
		{"an open quote in front", xff, proxy, []string{xff, `"1.2.3.4, 198.51.100.7`}, client},
		{"with a port", xff, proxy, []string{xff, "1.2.3.4, 198.51.100.7:4711"}, client},
		{"as IPv6", xff, proxy, []string{xff, "1.2.3.4, ::ffff:198.51.100.7"}, client},
		{"the proxy as IPv6", xff, "[::ffff:10.0.0.1]:5000", []string{xff, "198.51.100.7"}, client},
		{"another header", xff, proxy, []string{fwd, "for=1.2.3.4", real, "1.2.3.4", xff, "198.51.100.7"}, client},
		{"another header alone", xff, proxy, []string{fwd, "for=1.2.3.4", real, "1.2.3.4"}, "10.0.0.1/32"},
		{"nothing told", xff, proxy, nil, "10.0.0.1/32"},
		{"only garbage", xff, proxy, []string{xff, "unknown"}, "10.0.0.1/32"},
		{"garbage where the client should be", xff, proxy, []string{xff, "1.2.3.4, unknown, 10.0.0.2"}, "10.0.0.2/32"},
		{"a leading zero", xff, proxy, []string{xff, "198.051.100.007"}, "10.0.0.1/32"},
		{"only proxies", xff, proxy, []string{xff, "10.0.0.9, 10.0.0.2"}, "10.0.0.9/32"},
		{"IPv6", xff, proxy, []string{xff, "2001:db8:1:2:3:4:5:6"}, "2001:db8:1:2::/64"},
		{"IPv6 with a port", xff, proxy, []string{xff, "[2001:db8:1:2::1]:80"}, "2001:db8:1:2::/64"},
		{"IPv6 with a zone", xff, proxy, []string{xff, "fe80::1%zone1"}, "fe80::/64"},
		{"IPv6 with a zone, as the sender", xff, "[fe80::1%eth0]:80", nil, "fe80::/64"},
		{"IPv6 proxy", xff, "[2001:db8:ffff::1]:80", []string{xff, "198.51.100.7"}, client},

		{"Forwarded", fwd, proxy, []string{fwd, "for=198.51.100.7;proto=https;by=10.0.0.1"}, client},
		{"Forwarded, another in front", fwd, proxy, []string{fwd, "for=1.2.3.4, for=198.51.100.7"}, client},
		{"Forwarded, IPv6", fwd, proxy, []string{fwd, `for="[2001:db8:1:2::1]:4711"`}, "2001:db8:1:2::/64"},
		{"Forwarded, an open quote in front", fwd, proxy, []string{fwd, `for="1.2.3.4, for=198.51.100.7`}, client},
		{"Forwarded, an escape in front", fwd, proxy, []string{fwd, `for="1.2.3.4\", for=198.51.100.7`}, client},
		{"Forwarded, in another parameter, and a list", fwd, proxy, []string{fwd, `for=198.51.100.7;host="x, for=1.2.3.4"`}, client},
		{"Forwarded, in another parameter, with quotes", fwd, proxy, []string{fwd, `for=198.51.100.7;host="x\",for=1.2.3.4;y=\""`}, client},
		{"Forwarded, a backslash in another parameter", fwd, proxy, []string{fwd, `for=1.2.3.4,for=198.51.100.7;host="x\\"`}, client},
		{"Forwarded, twice in an element", fwd, proxy, []string{fwd, "for=1.2.3.4;for=198.51.100.7"}, "10.0.0.1/32"},
		{"Forwarded, unknown", fwd, proxy, []string{fwd, "for=1.2.3.4, for=unknown"}, "10.0.0.1/32"},
		{"Forwarded, not ours", fwd, "198.51.100.7:1", []string{fwd, "for=1.2.3.4"}, client},
		{"Forwarded, X-Forwarded-For is sent through", fwd, proxy, []string{fwd, "for=198.51.100.7", xff, "1.2.3.4"}, client},

		{"X-Real-IP", real, proxy, []string{real, "198.51.100.7"}, client},
		{"X-Real-IP, not ours", real, "198.51.100.7:1", []string{real, "1.2.3.4"}, client},
		{"X-Real-IP, others are sent through", real, proxy, []string{real, "198.51.100.7", xff, "1.2.3.4", fwd, "for=1.2.3.4"}, client},
	} {
		a, err := httplimit.NewAddresses(&httplimit.AddressConfig{
			Trusted: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8:ffff::/48")},
			Header:  test.trusted,
		})
		must(t, err)
		r := get("/", test.header...)
		r.RemoteAddr = test.from
		if got, err := a.Key(r); err != nil || got != test.want {
			t.Errorf("%s: got %q, %v, want %q", test.name, got, err, test.want)
		}
	}
}

func TestAddressesByOption(t *testing.T) {
	for _, test := range []struct {
		name   string
		config *httplimit.AddressConfig
		from   string
		header []string
		want   string // "" is an error
	}{
		{"no config", nil, "192.0.2.1:80", []string{"X-Forwarded-For", "1.2.3.4"}, "192.0.2.1/32"},
		{"networks", &httplimit.AddressConfig{IPv4Bits: 24}, "192.0.2.77:80", nil, "192.0.2.0/24"},
		{"IPv6 networks", &httplimit.AddressConfig{IPv6Bits: 48}, "[2001:db8:1:2::1]:80", nil, "2001:db8:1::/48"},
		{"a prefix of mapped addresses", &httplimit.AddressConfig{Trusted: []netip.Prefix{netip.MustParsePrefix("::ffff:10.0.0.0/104")}}, "10.1.1.1:80", []string{"X-Forwarded-For", "192.0.2.1"}, "192.0.2.1/32"},
		{"a Unix socket", nil, "@", []string{"X-Forwarded-For", "192.0.2.1"}, ""},
		{"a Unix socket that is trusted", &httplimit.AddressConfig{UnixSocket: true}, "@", []string{"X-Forwarded-For", "1.2.3.4, 192.0.2.1"}, "192.0.2.1/32"},
		{"a trusted Unix socket that tells nothing", &httplimit.AddressConfig{UnixSocket: true}, "@", nil, ""},
	} {
		a, err := httplimit.NewAddresses(test.config)
		must(t, err)
		r := get("/", test.header...)
		r.RemoteAddr = test.from
		if got, err := a.Key(r); got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("%s: got %q, %v, want %q", test.name, got, err, test.want)
		}
	}
}

// Whatever a client sends, a proxy that appends its address makes that the key.
func FuzzAddress(f *testing.F) {
	for _, s := range []string{
		"", "1.2.3.4", "1.2.3.4, 5.6.7.8", `"`, `for="`, `for="1.2.3.4\`, "for=[::1", "unknown", "10.0.0.2", "for=10.0.0.2",
		"::ffff:10.0.0.2", "[::1]:80", `for="[2001:db8::1]:80";by=_x`, ",,,", ";;;", "fe80::1%25eth0", "for=1;for=2", "\x00", `\",`,
	} {
		f.Add(s)
	}
	trusted := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	f.Fuzz(func(t *testing.T, sent string) {
		for _, header := range []string{"X-Forwarded-For", "Forwarded", "X-Real-Ip"} {
			a, err := httplimit.NewAddresses(&httplimit.AddressConfig{Trusted: trusted, Header: header})
			must(t, err)
			appended := "198.51.100.7"
			if header == "Forwarded" {
				appended = `for="198.51.100.7:80";proto=https`
			}
			for _, lines := range [][]string{{sent + ", " + appended}, {sent, appended}, {sent, appended + "," + strings.Replace(appended, "198.51.100.7", "10.0.0.2", 1)}} {
				r := &http.Request{RemoteAddr: "10.0.0.1:80", Header: http.Header{header: lines}}
				if got, err := a.Key(r); err != nil || got != "198.51.100.7/32" {
					t.Fatalf("%s %q: got %q, %v, want what the proxy appended", header, lines, got, err)
				}
			}
			alone := &http.Request{RemoteAddr: "10.0.0.1:80", Header: http.Header{header: {sent}}}
			if _, err := a.Key(alone); err != nil {
				t.Fatalf("%s %q: %v", header, sent, err)
			}
		}
	})
}

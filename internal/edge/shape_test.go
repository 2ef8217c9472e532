package edge_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// door is a key function of a text.
type door = func(string) (string, error)

func itself(s string) (string, error) { return s, nil }

// addressed returns a door of addresses, as far as they are the key.
func addressed(t *testing.T, ipv4, ipv6 int) door {
	t.Helper()
	a, err := edge.NewAddresses[any]("edge", &edge.AddressConfig{IPv4Bits: ipv4, IPv6Bits: ipv6}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return func(s string) (string, error) {
		addr, err := netip.ParseAddr(s)
		if err != nil {
			return "", err
		}
		return a.KeyOf(addr)
	}
}

var errNone = errors.New("no key")

func always(error) bool { return true }

// What somebody knows of a client is told from the keys that a door makes, and is put right; a key
// that the door has made is one of them.
func TestKeysThatADoorDerives(t *testing.T) {
	t.Parallel()
	address := addressed(t, 0, 0)
	for name, test := range map[string]struct {
		door   door
		shape  string
		others []string // that have rows
		given  string   // as somebody writes it
		want   string   // as the door does; "" if nobody can tell
	}{
		"an address":                {address, "IPv4/32", []string{"198.51.100.7", "2001:db8::1"}, "192.0.2.1", "192.0.2.1/32"},
		"an IPv6 address":           {address, "IPv6/64", []string{"2001:db8:1::1"}, "2001:db8:2::1", "2001:db8:2::/64"},
		"an address within IPv6":    {address, "IPv4/32", []string{"198.51.100.7"}, "::ffff:192.0.2.1", "192.0.2.1/32"},
		"a network of other bits":   {addressed(t, 24, 48), "IPv4/24", []string{"198.51.100.7"}, "192.0.2.1/32", "192.0.2.0/24"},
		"a hash":                    {edge.Hashed(itself), "hash", []string{"a", "b"}, "sk_live", edge.Hash("sk_live")},
		"the first of two":          {edge.FirstOf(always, errNone, address, itself), "text:IPv4/32", []string{"198.51.100.7"}, "192.0.2.1", "0:192.0.2.1/32"},
		"the second of two":         {edge.FirstOf(always, errNone, address, itself), "text:text", []string{"bob"}, "alice", "1:alice"},
		"the first of two, a hash":  {edge.FirstOf(always, errNone, edge.Hashed(itself)), "text:hash", []string{"a"}, "b", "0:" + edge.Hash("b")},
		"a part of two":             {edge.Join(itself, address), "address:IPv4/32", []string{"198.51.100.7"}, "192.0.2.1", ""},
		"a name, of a user's parts": {edge.Join(itself, itself), "text:text", []string{"bob"}, "alice", ""},
	} {
		shapes := map[string]bool{}
		row := ""
		for _, other := range test.others {
			key, err := test.door(other)
			if err != nil {
				t.Fatal(err)
			}
			if row == "" {
				row = key
			}
			shapes[edge.Shape(key)] = true
		}
		if !shapes[test.shape] {
			t.Errorf("%s: got shapes %v, want %q", name, shapes, test.shape)
		}
		if edge.Alike(test.given, shapes) {
			t.Errorf("%s: %q passes for a key of %v", name, test.given, shapes)
		}
		if got, ok := edge.Like(test.given, row); ok != (test.want != "") || ok && got != test.want {
			t.Errorf("%s: got %q, %t, want %q", name, got, ok, test.want)
		}
		if test.want != "" && !edge.Alike(test.want, shapes) {
			t.Errorf("%s: %q is not taken for a key of %v", name, test.want, shapes)
		}
		if made, err := test.door(test.given); err == nil && test.want != "" && made != test.want && test.given != "192.0.2.1/32" {
			t.Errorf("%s: the door makes %q, and want is %q", name, made, test.want)
		}
	}
}

func TestShape(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]string{
		"": "empty", "alice": "text", "12345": "text", "GET /orders/{id}": "text", "org 7": "text",
		"192.0.2.1": "address", "2001:db8::1": "address", "fe80::1%eth0": "address",
		"192.0.2.0/24": "IPv4/24", "2001:db8::/64": "IPv6/64", "10/8": "text",
		"1:2001\\:db8\\:\\:/64": "text:IPv6/64", `0:alice\:GET`: "text:text:text", "email:alice": "text:text", ":": "empty:empty",
		edge.Hash("a"): "hash", strings.Repeat("0f", 32): "hexadecimal", strings.Repeat("0f", 16): "text", `a\`: "text", `a:\`: `text:text`,
		strings.Repeat(`\:`, 1024): "text", "a\x00b": "text", "\xff": "text",
	} {
		if got := edge.Shape(key); got != want {
			t.Errorf("%q: got %q, want %q", key, got, want)
		}
	}
	// A network of the other family is no other shape, and one of other bits is.
	v4 := map[string]bool{"IPv4/32": true}
	for key, want := range map[string]bool{"2001:db8::/64": true, "192.0.2.0/24": false, "192.0.2.7/32": true, "0:192.0.2.7/32": false, "alice": false} {
		if got := edge.Alike(key, v4); got != want {
			t.Errorf("%q: got %t, want %t", key, got, want)
		}
	}
}

// No key has it go on without end, or makes one that cannot be.
func FuzzShape(f *testing.F) {
	for _, s := range []string{"", "a", `a\:b`, "1:192.0.2.1/32", "::", `\\:\`, "0:0:0", "1.1.1.1/33"} {
		f.Add(s, "0:192.0.2.1/32")
		f.Add("alice", s)
	}
	f.Fuzz(func(t *testing.T, key, row string) {
		if joined := ratelimit.Key(key, row); edge.Shape(joined) == "" {
			t.Error("no shape")
		}
		if like, ok := edge.Like(key, row); ok && like == "" {
			t.Errorf("%q like %q is empty", key, row)
		}
	})
}

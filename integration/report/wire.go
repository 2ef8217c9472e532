package main

import (
	"bytes"
	"context"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/relay"
)

// relayed has connections go through a relay, and each statement carry its text, so
// that the relay knows a COMMIT when it sees one.
func relayed(c *pgxpool.Config, address string) {
	host, port, _ := net.SplitHostPort(address)
	n, _ := strconv.Atoi(port) // it is a listener's
	c.ConnConfig.Host, c.ConnConfig.Port, c.ConnConfig.Fallbacks = host, uint16(n), nil
	c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
}

// relayTo returns a relay to the server with a URL.
func relayTo(url string) (*relay.Relay, error) {
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	return relay.New(pgconn.NetworkAddress(config.Host, config.Port))
}

func redirect(r *relay.Relay, url string) error {
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return err
	}
	r.Redirect(pgconn.NetworkAddress(config.Host, config.Port))
	return nil
}

// faulty does harm to some of what a relay passes on, and counts it.
type faulty struct {
	mu     sync.Mutex
	rarely int // one of so many messages
	done   map[string]int
	turns  map[string]int // of kinds of messages: how many came to harm
}

var harms = map[relay.Fate]string{
	relay.Cut: "cut before", relay.CutWithin: "cut within", relay.CutAfter: "cut after",
	relay.Slow: "byte by byte", relay.Silence: "silence from", relay.Fatal: "FATAL instead of",
}

// judge has all kinds of harm done to requests or answers, and to those of COMMIT more
// often.
func (f *faulty) judge(what string, fates []relay.Fate) relay.Judge {
	for _, fate := range fates {
		f.done[harms[fate]+" COMMIT's "+what], f.done[harms[fate]+" a statement's "+what] = 0, 0
	}
	return func(_ int, message []byte) relay.Fate {
		kind, rarely := "a statement's "+what, f.rarely
		if bytes.Contains(bytes.ToUpper(message), []byte("COMMIT\x00")) {
			kind, rarely = "COMMIT's "+what, f.rarely/4
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.turns[kind] < len(fates) { // until each has happened once
			rarely /= 4
		}
		if rand.IntN(max(rarely, 1)) > 0 {
			return relay.Pass
		}
		fate := fates[f.turns[kind]%len(fates)]
		f.turns[kind]++
		f.done[harms[fate]+" "+kind]++
		return fate
	}
}

// interfere has a relay do all kinds of harm.
func (f *faulty) interfere(r *relay.Relay) {
	fates := []relay.Fate{relay.Cut, relay.CutWithin, relay.CutAfter, relay.Slow, relay.Silence}
	r.Interfere(f.judge("request", fates), f.judge("answer", append(fates, relay.Fatal)))
}

// counts returns how often each kind of harm was done.
func (f *faulty) counts(where string) (counts []count) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, what := range slices.Sorted(maps.Keys(f.done)) {
		counts = append(counts, count{where + what, f.done[what]})
	}
	return counts
}

// attackWire has processes work through a network that loses, cuts and delays.
func attackWire(ctx context.Context, l *site, c *chapter) error {
	r, err := relayTo(l.server.URL)
	if err != nil {
		return err
	}
	defer r.Close()
	f := &faulty{rarely: 60, done: map[string]int{}, turns: map[string]int{}}
	f.interfere(r)
	c.say("Two processes repeat the exact accounts through a relay. It cuts connections before, within and after requests and answers. It passes some byte by byte, answers FATAL as a pooler does, or goes silent while new connections work. A call that ended with an error may have taken its tokens or not. All other calls are counted exactly.")
	_, err = l.suffer(ctx, c, attack{lasts: l.seconds(40, 10), tasks: []task{
		{Conns: 8, Workers: 8, Relay: r.Address().String(), Patience: 1500 * time.Millisecond},
		{Conns: 8, Workers: 8, Relay: r.Address().String(), Patience: 1500 * time.Millisecond, Isolation: "serializable"},
	}, must: func(*suffering) []count { return f.counts("") }})
	return err
}

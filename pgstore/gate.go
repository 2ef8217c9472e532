package pgstore

import (
	"context"
	"slices"
	"sync"

	"github.com/pgratelimit/ratelimit"
)

// Transactions of one process that take from one row queue here, before they
// begin and before they hold a connection. They would queue for the row in any
// case, since it stays locked until COMMIT; but in PostgreSQL those who waited
// have lost, since under SERIALIZABLE the row has changed since their snapshot
// (40001), and those who wait keep connections from others.
//
// A limit with several shards has a place for each, so that every transaction
// has a shard of its own.

// gates are the rows that transactions of this process are at.
type gates struct {
	most int // transactions that may be within one gate: as many as there can be connections; 0 for any number

	mu   sync.Mutex
	open map[sheetKey]*gate
}

type gate struct {
	users   int       // at the gate or within
	within  int       // hold a shard
	free    []int     // shards, in no order
	waiting []*waiter // in order of arrival
}

// waiter waits for a shard.
type waiter struct {
	ask   ratelimit.Ask
	alone bool       // its call asks for nothing else
	turn  chan lease // has room for one
	gone  bool       // gave up when it was no longer among those waiting
}

// lease is a shard, and perhaps a transaction that has begun already.
type lease struct {
	shard int
	ahead *ahead
}

// pass is what a call holds: a shard of each of its limits.
type pass struct {
	gates  *gates
	call   ratelimit.Call
	shards []int
	ahead  *ahead // nil unless its transaction has begun
	length int    // that of ahead
}

// enter waits until each of the call's limits has a shard for it. All calls
// wait in one order, so none waits for one that waits for it.
func (g *gates) enter(ctx context.Context, call ratelimit.Call, memory *shardMemory) (*pass, error) {
	p := &pass{gates: g, call: call}
	for _, a := range call.Asks {
		l, err := g.wait(ctx, &waiter{ask: a, alone: len(call.Asks) == 1}, memory)
		if err != nil {
			p.leave()
			return nil, err
		}
		p.shards, p.ahead = append(p.shards, l.shard), l.ahead
	}
	return p, nil
}

func (p *pass) leave() {
	for i, shard := range p.shards {
		p.gates.leave(keyOf(p.call.Asks[i]), shard)
	}
	p.shards = nil
}

func (g *gates) wait(ctx context.Context, w *waiter, memory *shardMemory) (lease, error) {
	key := keyOf(w.ask)
	g.mu.Lock()
	at, ok := g.open[key]
	if !ok {
		if g.open == nil {
			g.open = make(map[sheetKey]*gate)
		}
		at = &gate{free: upTo(key.shards)}
		g.open[key] = at
	}
	at.users++
	if len(at.free) > 0 && (g.most == 0 || at.within < g.most) {
		shard := memory.choose(w.ask, at.free)
		at.free = slices.DeleteFunc(at.free, func(free int) bool { return free == shard })
		at.within++
		g.mu.Unlock()
		return lease{shard: shard}, nil
	}
	w.turn = make(chan lease, 1)
	at.waiting = append(at.waiting, w)
	g.mu.Unlock()
	select {
	case l := <-w.turn:
		return l, nil
	case <-ctx.Done():
		g.giveUp(key, w)
		return lease{}, ctx.Err()
	}
}

// giveUp leaves the queue. If its turn came in the meantime, it passes it on.
func (g *gates) giveUp(key sheetKey, w *waiter) {
	g.mu.Lock()
	at := g.open[key]
	var came lease
	if i := slices.Index(at.waiting, w); i >= 0 {
		at.waiting = slices.Delete(at.waiting, i, i+1)
		g.less(key, at)
	} else if len(w.turn) > 0 {
		came = <-w.turn
		g.pass(key, at, came.shard)
	} else { // it will come, from who took w out of the queue
		w.gone = true
		g.less(key, at)
	}
	g.mu.Unlock()
	if came.ahead != nil {
		came.ahead.abandon()
	}
}

// leave gives the shard back.
func (g *gates) leave(key sheetKey, shard int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pass(key, g.open[key], shard)
}

// pass has one leave, and hands its shard to who has waited longest.
func (g *gates) pass(key sheetKey, at *gate, shard int) {
	if len(at.waiting) > 0 {
		at.waiting[0].turn <- lease{shard: shard}
		at.waiting = at.waiting[1:]
	} else {
		at.free = append(at.free, shard)
		at.within--
	}
	g.less(key, at)
}

func (g *gates) less(key sheetKey, at *gate) {
	if at.users--; at.users == 0 {
		delete(g.open, key)
	}
}

// next takes the one who has waited longest out of the queue, if both calls are
// for this row only and its take fits there. It must be given its turn.
func (p *pass) next(fits func(ratelimit.Ask) bool) *waiter {
	if len(p.shards) != 1 {
		return nil
	}
	p.gates.mu.Lock()
	defer p.gates.mu.Unlock()
	at := p.gates.open[keyOf(p.call.Asks[0])]
	if len(at.waiting) == 0 || !at.waiting[0].alone || !fits(at.waiting[0].ask) {
		return nil
	}
	w := at.waiting[0]
	at.waiting = at.waiting[1:]
	return w
}

// give leaves, and hands the lease to w, which next returned. It reports whether
// w was still there for it.
func (p *pass) give(w *waiter, ahead *ahead) bool {
	g, key, shard := p.gates, keyOf(p.call.Asks[0]), p.shards[0]
	p.shards = nil
	g.mu.Lock()
	defer g.mu.Unlock()
	at := g.open[key]
	if w.gone {
		g.pass(key, at, shard)
		return false
	}
	w.turn <- lease{shard, ahead}
	g.less(key, at)
	return true
}

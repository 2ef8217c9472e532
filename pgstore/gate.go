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
	mu   sync.Mutex
	open map[sheetKey]*gate
}

type gate struct {
	users   int          // at the gate or within
	free    []int        // shards, in no order
	waiting []chan<- int // for a shard, in order of arrival
}

// pass is what a call holds: a shard of each of its limits.
type pass struct {
	gates  *gates
	call   ratelimit.Call
	shards []int
}

// enter waits until each of the call's limits has a shard for it. All calls
// wait in one order, so none waits for one that waits for it.
func (g *gates) enter(ctx context.Context, call ratelimit.Call, memory *shardMemory) (*pass, error) {
	p := &pass{gates: g, call: call}
	for _, a := range call.Asks {
		shard, err := g.wait(ctx, a, memory)
		if err != nil {
			p.leave()
			return nil, err
		}
		p.shards = append(p.shards, shard)
	}
	return p, nil
}

func (p *pass) leave() {
	for i, shard := range p.shards {
		p.gates.leave(keyOf(p.call.Asks[i]), shard)
	}
	p.shards = nil
}

func (g *gates) wait(ctx context.Context, a ratelimit.Ask, memory *shardMemory) (int, error) {
	key := keyOf(a)
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
	if len(at.free) > 0 {
		shard := memory.choose(a, at.free)
		at.free = slices.DeleteFunc(at.free, func(free int) bool { return free == shard })
		g.mu.Unlock()
		return shard, nil
	}
	turn := make(chan int, 1)
	at.waiting = append(at.waiting, turn)
	g.mu.Unlock()
	select {
	case shard := <-turn:
		return shard, nil
	case <-ctx.Done():
		g.giveUp(key, turn)
		return 0, ctx.Err()
	}
}

// giveUp leaves the queue; if its turn came in the meantime, it passes it on.
func (g *gates) giveUp(key sheetKey, turn chan int) {
	g.mu.Lock()
	at := g.open[key]
	for i, w := range at.waiting {
		if w == turn {
			at.waiting = append(at.waiting[:i], at.waiting[i+1:]...)
			at.users--
			g.mu.Unlock()
			return
		}
	}
	g.mu.Unlock()
	g.leave(key, <-turn)
}

// leave hands the shard to the one who has waited longest.
func (g *gates) leave(key sheetKey, shard int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	at := g.open[key]
	if len(at.waiting) > 0 {
		at.waiting[0] <- shard
		at.waiting = at.waiting[1:]
	} else {
		at.free = append(at.free, shard)
	}
	if at.users--; at.users == 0 {
		delete(g.open, key)
	}
}

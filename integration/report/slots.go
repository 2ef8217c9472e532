package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// slotLimit is under attack; its leases are short, so that many of them end.
var slotLimit = ratelimit.InFlight{Name: "in flight", Limit: 4, Lease: 500 * time.Millisecond}

// held is what a holder believed: that it had a slot from one instant to another, on the clock
// of the machine.
type held struct {
	Number   int
	Fence    int64
	From, To int64 // microseconds
	Lost     bool  // and was told so
}

// holdSlots holds slots, and notes each 5 ms that it believes to hold one.
func holdSlots(ctx context.Context, e *env) error {
	var group sync.WaitGroup
	for worker := range e.Workers {
		random := rand.New(rand.NewPCG(e.Seed, uint64(worker)))
		group.Go(func() {
			for ctx.Err() == nil {
				_ = e.store.Hold(ctx, slotLimit, "", func(ctx context.Context, slot ratelimit.Slot) error {
					h := held{Number: slot.Number, Fence: slot.Fence, From: time.Now().UnixMicro()}
					h.To = h.From
					for end := time.Now().Add(time.Duration(random.IntN(1500)) * time.Millisecond); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
						now := time.Now().UnixMicro() // before it asks: it may be stopped in between
						if h.Lost = ctx.Err() != nil; h.Lost {
							break
						}
						h.To = now
						e.out.write(h)
					}
					e.out.write(h)
					return nil
				})
			}
		})
	}
	group.Wait()
	return nil
}

// attackSlots has processes hold slots while some are killed, some stand still past their
// leases and go on, and the server stands still.
func attackSlots(ctx context.Context, l *lab, c *chapter) error {
	c.say("Eight processes of four goroutines hold the 4 slots of one key, with leases of 500 ms, and note each 5 ms that they believe to hold one, by the clock of the machine, which is the server's too. Some are killed, some stand still past their leases and go on (SIGSTOP), and so does the server. Then all are killed, and somebody else takes every slot.")
	schema, pool, err := l.place(ctx, 8)
	if err != nil {
		return err
	}
	defer pool.Close()
	const processes = 8
	var mu sync.Mutex
	last := map[[2]int64]held{} // of each slot and fence
	children := make([]*child, 0, processes)
	launch := func(process int) error {
		child, err := start(ctx, task{Job: "slots", URL: l.server.URL, Schema: schema, Process: process, Workers: 4, Conns: 4, Seed: uint64(process)}, func(line []byte) error {
			var h held
			if err := json.Unmarshal(line, &h); err != nil {
				return nil // the last line of one that was killed
			}
			mu.Lock()
			defer mu.Unlock()
			last[[2]int64{int64(h.Number), h.Fence}] = h
			return nil
		})
		children = append(children, child)
		return err
	}
	for process := range processes {
		if err := launch(process); err != nil {
			return err
		}
	}
	killed, stopped, stalls := 0, 0, 0
	for end := time.Now().Add(l.seconds(60, 10)); time.Now().Before(end); {
		time.Sleep(slotLimit.Lease)
		victim := children[len(children)-1-rand.IntN(processes)].cmd.Process
		switch rand.IntN(4) {
		case 0:
			if victim.Kill() == nil {
				killed++
				if err := launch(len(children)); err != nil {
					return err
				}
			}
		case 1, 2:
			if victim.Signal(syscall.SIGSTOP) == nil {
				time.Sleep(2 * slotLimit.Lease)
				_ = victim.Signal(syscall.SIGCONT)
				stopped++
			}
		case 3:
			resume, err := l.server.Suspend(ctx)
			if err != nil {
				return err
			}
			time.Sleep(2 * slotLimit.Lease)
			if err := resume(); err != nil {
				return err
			}
			stalls++
		}
	}
	for _, child := range children {
		_ = child.cmd.Process.Kill()
	}
	dead := time.Now()
	end(children)
	store, err := pgstore.New(pool, &pgstore.Config{Schema: schema})
	if err != nil {
		return err
	}
	back, err := takeAllSlots(ctx, store, dead)
	if err != nil {
		return err
	}
	var rows int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM "+schema+".rate_limits").Scan(&rows); err != nil {
		return err
	}
	overlaps, disorder, lost := judgeHeld(last)
	c.zero("two believed to hold one slot at a time", overlaps)
	c.zero("a smaller fence was held after a larger one", disorder)
	c.happened(count{"slots held", len(last)}, count{"told that they have lost theirs", lost}, count{"processes killed", killed}, count{"stood still", stopped}, count{"servers stood still", stalls})
	c.atMost("all slots taken again after everybody was killed", back.Seconds()*1000, float64((slotLimit.Lease + 500*time.Millisecond).Milliseconds()), "ms")
	c.atMost("rows", float64(rows), float64(slotLimit.Limit), "")
	return nil
}

// takeAllSlots takes every slot, and returns how long after an instant it had them.
func takeAllSlots(ctx context.Context, store *pgstore.Store, dead time.Time) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, patient)
	defer cancel()
	for range slotLimit.Limit {
		long := slotLimit
		long.Lease = time.Hour
		if _, err := store.AcquireWait(ctx, long, ""); err != nil {
			return 0, fmt.Errorf("taking all slots: %w", err)
		}
	}
	return time.Since(dead), nil
}

// judgeHeld counts the holders of a slot whose beliefs overlap, and those who held it in
// another order than that of their fences.
func judgeHeld(all map[[2]int64]held) (overlaps, disorder, lost int) {
	of := map[int][]held{}
	for _, h := range all {
		of[h.Number] = append(of[h.Number], h)
		if h.Lost {
			lost++
		}
	}
	for _, holders := range of {
		slices.SortFunc(holders, func(a, b held) int { return int(a.From - b.From) })
		for i, h := range holders[:len(holders)-1] {
			next := holders[i+1]
			if next.From < h.To {
				overlaps++
			}
			if next.Fence <= h.Fence {
				disorder++
			}
		}
	}
	return overlaps, disorder, lost
}

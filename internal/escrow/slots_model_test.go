package escrow_test

import (
	"fmt"
	"testing"
)

// A model of tokens that are taken ahead from a sliding window, as that of the other
// kinds, but for two things: a row knows what each slot holds, and what is looked at is
// what was really used in all slots that a window can touch.

const (
	keptSlots   = 3 // two of a period, and one more
	slotTicks   = 2
	slotHolders = 2
)

// slotRules are those of a model of a sliding window.
type slotRules struct {
	rate   int  // tokens in a window
	after  bool // what was taken ahead can be used after its slot
	newest bool // what is left is given back to the newest slot
}

// slotHolder is a process that has taken ahead; see holder.
type slotHolder struct {
	tokens, sent int
	ago          int // slots before the newest, the one in which they are counted is
	ahead        int
	stopped      bool
}

// slotState is the state of a model of a sliding window: what the row has counted and
// what was used in each slot, the newest first.
type slotState struct {
	counted, used [keptSlots]int
	tick          int // of the newest slot
	held          [slotHolders]slotHolder
}

func sum(slots [keptSlots]int) (n int) {
	for _, in := range slots {
		n += in
	}
	return n
}

func (r slotRules) tooMuch(s slotState) bool { return sum(s.used) > r.rate }

// next calls visit with all states that can follow one.
func (r slotRules) next(s slotState, visit func(what string, to slotState)) {
	r.tick(s, visit)
	free := r.rate - sum(s.counted)
	if free > 0 {
		to := s
		to.counted[0]++
		to.used[0]++
		visit("take one from the row", to)
	}
	for i, h := range s.held {
		with := func(h slotHolder) slotState {
			to := s
			if h.tokens+h.sent == 0 {
				h = slotHolder{stopped: h.stopped}
			}
			to.held[i] = h
			return to
		}
		r.arrive(s, i, with, visit)
		if h.stopped {
			h.stopped = false
			visit(fmt.Sprintf("%d goes on", i), with(h))
			continue
		}
		for n := 1; n <= free && h.tokens+h.sent == 0; n++ {
			for ahead := range 2 {
				to := with(slotHolder{tokens: n, ahead: ahead})
				to.counted[0] += n
				visit(fmt.Sprintf("%d takes %d ahead", i, n), to)
			}
		}
		if h.tokens+h.sent == 0 {
			continue
		}
		stopped := h
		stopped.stopped = true
		visit(fmt.Sprintf("%d is stopped", i), with(stopped))
		visit(fmt.Sprintf("%d is killed", i), with(slotHolder{sent: h.sent, ago: h.ago, ahead: h.ahead}))
		if h.tokens > 0 && (r.after || h.ago == 0 && s.tick+h.ahead < slotTicks) {
			used := h
			used.tokens--
			to := with(used)
			to.used[0]++
			visit(fmt.Sprintf("%d uses one", i), to)
		}
		if h.tokens > 0 && h.sent == 0 {
			h.sent, h.tokens = h.tokens, 0
			visit(fmt.Sprintf("%d gives back", i), with(h))
		}
	}
}

// tick lets time pass.
func (r slotRules) tick(s slotState, visit func(string, slotState)) {
	if s.tick = (s.tick + 1) % slotTicks; s.tick == 0 {
		copy(s.counted[1:], s.counted[:])
		copy(s.used[1:], s.used[:])
		s.counted[0], s.used[0] = 0, 0
		for i := range s.held {
			if h := &s.held[i]; h.tokens+h.sent > 0 {
				h.ago = min(h.ago+1, keptSlots)
			}
		}
	}
	visit("a tick", s)
}

// arrive is a statement that gives back, at the row, now or later.
func (r slotRules) arrive(s slotState, i int, with func(slotHolder) slotState, visit func(string, slotState)) {
	h := s.held[i]
	if h.sent == 0 {
		return
	}
	back, ago := h.sent, h.ago
	h.sent = 0
	to := with(h)
	if r.newest {
		ago = 0
	}
	if ago < keptSlots {
		to.counted[ago] -= min(back, to.counted[ago])
	}
	visit(fmt.Sprintf("%d gave back", i), to)
}

func TestSlotsModel(t *testing.T) {
	for name, test := range map[string]struct {
		slotRules
		breaks bool
	}{
		"a sliding window":              {slotRules{rate: 3}, false},
		"used after its slot":           {slotRules{rate: 3, after: true}, true},
		"given back to the newest slot": {slotRules{rate: 3, newest: true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			path, states := explore(slotState{}, test.next, test.tooMuch)
			t.Logf("%d states", states)
			if (path != nil) != test.breaks {
				t.Errorf("of %d states, want one with too much: %v; got %q", states, test.breaks, path)
			}
			if states < 100 {
				t.Errorf("there are %d states only", states)
			}
		})
	}
}

package escrow_test

import (
	"fmt"
	"testing"
)

// A model of tokens that are taken ahead, small enough to look at every state that it
// can be in: a row, some holders, and whole tokens and ticks. It is what the rules of
// this package come from; each rule is needed, as the model breaks without it.

// rules are those of a model.
type rules struct {
	capacity, rate, lasts int  // tokens; tokens a tick; ticks for which what was taken ahead can be used
	lowered               bool // whoever takes ahead counts with a capacity that is lower by what is refilled until the end
	window                bool // a fixed window: as many ticks long, all is refilled at its edge, and what was taken ahead ends with it
	late                  bool // what is left can be given back after the end
	whole                 bool // all that is left is given back, however old it is
}

const holders = 3

// holder is a process that has taken ahead. One that is stopped does nothing for any
// number of ticks, as each can in the model; one that is killed has nothing any more.
type holder struct {
	tokens  int // in its memory
	sent    int // that are on their way back to the row
	age     int // ticks since they were taken
	ahead   int // ticks by which its own clock, read before it asked, says more
	stopped bool
}

// state is the state of a model: what is in the row, settled, and in memories.
type state struct {
	row  int
	tick int // of the window
	held [holders]holder
}

// inMemory is what a state's holders can still use or give back.
func (r rules) inMemory(s state) (n int) {
	for _, h := range s.held {
		if h.age < r.lasts {
			n += h.tokens + h.sent
		}
	}
	return n
}

// next calls visit with all states that can follow one.
func (r rules) next(s state, visit func(what string, to state)) {
	r.tick(s, visit)
	if s.row > 0 {
		to := s
		to.row--
		visit("take one from the row", to)
	}
	for i, h := range s.held {
		with := func(h holder) state {
			to := s
			if h.tokens+h.sent == 0 {
				h = holder{stopped: h.stopped} // what it had is of no matter, so that there are fewer states
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
		if h.tokens+h.sent == 0 {
			r.takeAhead(s, i, visit)
			continue
		}
		stopped := h
		stopped.stopped = true
		visit(fmt.Sprintf("%d is stopped", i), with(stopped))
		visit(fmt.Sprintf("%d is killed", i), with(holder{sent: h.sent, age: h.age, ahead: h.ahead}))
		if h.tokens > 0 && h.age+h.ahead < r.lasts {
			used := h
			used.tokens--
			visit(fmt.Sprintf("%d uses one", i), with(used))
		}
		if h.tokens > 0 && h.sent == 0 {
			h.sent, h.tokens = h.tokens, 0
			visit(fmt.Sprintf("%d gives back", i), with(h))
		}
	}
}

// tick lets time pass.
func (r rules) tick(s state, visit func(string, state)) {
	edge := !r.window
	if r.window {
		s.tick = (s.tick + 1) % r.lasts
		edge = s.tick == 0
	}
	if edge {
		s.row = min(s.row+r.rate, r.capacity)
	}
	for i := range s.held {
		h := &s.held[i]
		if h.tokens+h.sent == 0 {
			continue
		}
		if h.age = min(h.age+1, r.lasts); h.age == r.lasts && !r.late {
			*h = holder{stopped: h.stopped} // lost
		}
	}
	visit("a tick", s)
}

// takeAhead is a statement that takes ahead. It may have been under way for a while.
func (r rules) takeAhead(s state, i int, visit func(string, state)) {
	row := s.row
	if r.lowered {
		row = min(row, r.capacity-r.rate*r.lasts)
	}
	for n := 1; n <= row; n++ {
		for ahead := range 2 {
			to := s
			to.row = row - n
			to.held[i] = holder{tokens: n, age: s.tick, ahead: ahead}
			visit(fmt.Sprintf("%d takes %d ahead", i, n), to)
		}
	}
}

// arrive is a statement that gives back, at the row, now or later. The row knows how
// old it is.
func (r rules) arrive(s state, i int, with func(holder) state, visit func(string, state)) {
	h := s.held[i]
	if h.sent == 0 {
		return
	}
	back := h.sent
	if !r.whole && !r.window {
		back = max(0, back-r.rate*h.age)
	}
	if h.age >= r.lasts && !r.late {
		back = 0
	}
	h.sent = 0
	to := with(h)
	to.row = min(to.row+back, r.capacity)
	visit(fmt.Sprintf("%d gave back", i), to)
}

// tooMuch reports whether there is too much.
func (r rules) tooMuch(s state) bool { return s.row+r.inMemory(s) > r.capacity }

// explore looks at every state that can follow a start, and returns how it came to one
// that is broken; nil if there is none.
func explore[S comparable](start S, next func(S, func(string, S)), broken func(S) bool) (path []string, states int) {
	type from struct {
		state S
		what  string
	}
	came := map[S]from{start: {}}
	queue := []S{start}
	for len(queue) > 0 {
		s := queue[0]
		queue = queue[1:]
		if broken(s) {
			for at := s; at != start; at = came[at].state {
				path = append([]string{fmt.Sprintf("%s: %+v", came[at].what, at)}, path...)
			}
			return path, len(came)
		}
		next(s, func(what string, to S) {
			if _, ok := came[to]; !ok {
				came[to] = from{s, what}
				queue = append(queue, to)
			}
		})
	}
	return nil, len(came)
}

func TestModel(t *testing.T) {
	bucket := rules{capacity: 5, rate: 1, lasts: 3, lowered: true}
	window := rules{capacity: 5, rate: 3, lasts: 2, window: true}
	for name, test := range map[string]struct {
		rules
		change func(*rules)
		breaks bool
	}{
		"a token bucket":                        {bucket, func(*rules) {}, false},
		"for one tick":                          {bucket, func(r *rules) { r.lasts = 1 }, false},
		"at a higher rate":                      {bucket, func(r *rules) { r.rate, r.lasts = 2, 2 }, false},
		"the capacity is not lowered":           {bucket, func(r *rules) { r.lowered = false }, true},
		"given back as much as was taken ahead": {bucket, func(r *rules) { r.whole = true }, true},
		"a window":                              {window, func(*rules) {}, false},
		"a window, given back after the end":    {window, func(r *rules) { r.late = true }, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := test.rules
			test.change(&r)
			path, states := explore(state{row: r.capacity}, r.next, r.tooMuch)
			if (path != nil) != test.breaks {
				t.Errorf("of %d states, want one with too much: %v; got %q", states, test.breaks, path)
			}
			if states < 100 {
				t.Errorf("there are %d states only", states)
			}
		})
	}
}

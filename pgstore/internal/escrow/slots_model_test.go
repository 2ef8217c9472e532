package escrow_test

import (
	"slices"
	"testing"
)

// A model of a sliding window that tokens are prefetched from, as that of the other kinds,
// but that its row knows what each slot holds, and that a tick is a slot. What was prefetched
// can be used in its slot, and goes back to that, be it that it is late; so does what is
// cancelled. Ahead is what is out of the slot of now. Only credit looks at it, as it names no
// slot, and can be of what is so old that none holds it any more: while anything is out, it
// leaves as much in the slot of now, and all that is reserved after that.

const (
	slotLeases = 2

	next = 0 // the slot after that of now, which can be reserved
	now  = 1 // the slot of now
	all  = 4 // with those before it that a window can hold as well
)

// slotRules are those of a model of a sliding window of two slots, so that no three hold
// more than the rate.
type slotRules struct {
	rate     int8
	punctual bool // see verbs

	without struct {
		end      bool // what was prefetched can be used after its slot
		own      bool // leftovers go back to the newest slot
		ahead    bool // credit may take all that the slots hold
		place    bool // credit leaves as much as is out, be it in another slot
		counting bool // leftovers and what was used are taken off the ahead of another slot
		reset    bool // reset forgets what is out
		saying   bool // what was used is said later
	}
}

// slotLease is a lease; see there. It is of a slot so many before that of now, and usable in
// that of now.
type slotLease struct {
	left, used, sent, said, ago int8
}

func (l *slotLease) claim() int8 { return l.left + l.used + l.sent + l.said }

// slotState is the state of a model: what the row has counted in each slot, and what was
// granted and has not come back.
type slotState struct {
	counted, granted [all]int8
	ahead            int8
	leases           [slotLeases]slotLease
}

// kept are the slots that the row knows: three, the newest of which is that which was given
// anything.
func (s *slotState) kept() (newest int) {
	if s.counted[next] > 0 {
		return next
	}
	return now
}

func sum(slots []int8) (n int8) {
	for _, in := range slots {
		n += in
	}
	return n
}

// slotDoing is doing for a sliding window.
type slotDoing = func(what string, i int, change func(*slotState, *slotLease))

// next calls visit with all states that can follow one.
func (r *slotRules) next(s slotState, visit func(step, slotState)) {
	do := func(what string, i int, change func(*slotState, *slotLease)) {
		to := s
		change(&to, &to.leases[max(i, 0)])
		r.tidy(&to)
		visit(step{what, i}, to)
	}
	r.pass(s, do)
	r.comeBack(&s, do)
	room := func(slot int) int8 { return r.rate - sum(s.counted[slot:slot+3]) }
	grant := func(slot int) func(s *slotState, _ *slotLease) {
		return func(s *slotState, _ *slotLease) { s.counted[slot]++; s.granted[slot]++ }
	}
	free := int8(0)
	if s.kept() == now {
		free = room(now)
	}
	switch {
	case free > 0:
		do("take", -1, grant(now))
	case room(next) > 0:
		do("reserve", -1, grant(next))
	}
	for i := range s.leases {
		if l := &s.leases[i]; l.claim() > 0 {
			r.lease(l, i, do)
			continue
		}
		for n := int8(1); n <= min(free, r.rate-s.ahead); n++ {
			do("prefetch", i, func(s *slotState, l *slotLease) {
				s.counted[now], s.ahead, l.left = s.counted[now]+n, s.ahead+n, n
			})
		}
	}
}

// pass lets a slot pass.
func (r *slotRules) pass(s slotState, do slotDoing) {
	for i := range s.leases {
		if l := &s.leases[i]; r.punctual && l.left+l.sent > 0 {
			return
		}
	}
	do("a slot passes", -1, func(s *slotState, _ *slotLease) {
		copy(s.counted[1:], s.counted[:])
		copy(s.granted[1:], s.granted[:])
		s.counted[next], s.granted[next], s.ahead = 0, 0, 0
		for i := range s.leases {
			s.leases[i].ago++
		}
	})
}

// comeBack is what comes back that somebody was told of, and a reset.
func (r *slotRules) comeBack(s *slotState, do slotDoing) {
	newest := s.kept()
	if !r.punctual || sum(s.granted[now:newest+3]) > 0 { // what is reserved is cancelled
		do("credit", -1, func(s *slotState, _ *slotLease) { r.credit(s, newest) })
	}
	for slot := newest; slot < newest+3; slot++ {
		if s.granted[slot] > 0 {
			do("cancel", -1, func(s *slotState, _ *slotLease) {
				s.granted[slot]--
				s.counted[slot] = max(0, s.counted[slot]-1)
			})
		}
	}
	if !r.punctual {
		do("reset", -1, func(s *slotState, _ *slotLease) {
			s.counted, s.granted = [all]int8{}, [all]int8{}
			if s.counted[now] = s.ahead; r.without.reset {
				s.counted[now], s.ahead = 0, 0
			}
		})
	}
}

// credit takes one out of the oldest slot that holds any. While something is out of the slot
// of now it leaves that there, and takes nothing out of what is reserved after it.
func (r *slotRules) credit(s *slotState, newest int) {
	oldest := newest + 2
	for slot := oldest; slot >= newest; slot-- {
		if s.granted[slot] > 0 {
			s.granted[slot]--
			break
		}
	}
	if r.without.place && sum(s.counted[newest:newest+3]) <= s.ahead {
		return
	}
	for slot := oldest; slot >= newest; slot-- {
		least := int8(0)
		if s.ahead > 0 && slot <= now && !r.without.ahead && !r.without.place {
			least = s.counted[slot]
			if slot == now {
				least = s.ahead
			}
		}
		if s.counted[slot] > least {
			s.counted[slot]--
			return
		}
	}
}

// lease is what happens to a lease.
func (r *slotRules) lease(l *slotLease, i int, do slotDoing) {
	if l.left > 0 && (l.ago == 0 || r.without.end) {
		do("use", i, func(s *slotState, l *slotLease) {
			l.left, l.used = l.left-1, l.used+1
			if s.granted[now]++; r.punctual && !r.without.saying {
				l.used, s.ahead = 0, s.ahead-1
			}
		})
	}
	if l.sent+l.said > 0 {
		do("arrive", i, r.arrive)
	} else {
		if l.used > 0 {
			do("say", i, func(_ *slotState, l *slotLease) { l.said, l.used = l.used, 0 })
		}
		if l.left > 0 {
			do("give back", i, func(_ *slotState, l *slotLease) { l.sent, l.said, l.left, l.used = l.left, l.used, 0, 0 })
		}
	}
	if !r.punctual {
		do("kill", i, func(_ *slotState, l *slotLease) { l.left, l.used = 0, 0 })
	}
}

// arrive is a statement that gives back, at the row, now or later.
func (r *slotRules) arrive(s *slotState, l *slotLease) {
	if l.ago == 0 || r.without.counting {
		s.ahead = max(s.ahead-l.sent-l.said, 0)
	}
	slot := now + int(l.ago)
	if r.without.own {
		slot = now
	}
	if slot < s.kept()+3 {
		s.counted[slot] -= min(l.sent, s.counted[slot])
	}
	l.sent, l.said = 0, 0
}

// tidy makes one state of those that are alike: nobody looks at what was used of a slot that
// is over, nor at leftovers of one that no window holds.
func (r *slotRules) tidy(s *slotState) {
	for i := range s.leases {
		l := &s.leases[i]
		if l.ago = min(l.ago, all); l.ago > 0 && !r.without.counting {
			l.used, l.said = 0, 0
		}
		if l.claim() == 0 || l.ago > 2 && !r.without.end && !r.without.own {
			*l = slotLease{}
		}
	}
	slices.SortFunc(s.leases[:], func(a, b slotLease) int {
		return slices.Compare([]int8{a.left, a.used, a.sent, a.said, a.ago}, []int8{b.left, b.used, b.sent, b.said, b.ago})
	})
}

// broken is what is wrong with a state: a window holds more than the rate; or, if nobody is
// killed or late, more is counted than was granted and is in memory, so that it is lost.
func (r *slotRules) broken(s slotState) string {
	for slot := next; slot <= now; slot++ {
		if sum(s.granted[slot:slot+3]) > r.rate {
			return "a window holds more than the rate"
		}
	}
	if r.punctual {
		lost := sum(s.counted[now:]) - sum(s.granted[now:])
		for i := range s.leases {
			lost -= s.leases[i].left + s.leases[i].sent
		}
		if lost > 0 {
			return "something was lost"
		}
	}
	return ""
}

func TestSlotsModel(t *testing.T) {
	const over, lost = "a window holds more than the rate", "something was lost"
	for _, test := range []struct {
		name   string
		rate   int8
		change func(*slotRules)
		breaks string
		in     int // steps
	}{
		{"a sliding window", 3, func(*slotRules) {}, "", 0},
		{"a punctual one", 7, func(r *slotRules) { r.punctual = true }, "", 0},
		{"used after its slot", 3, func(r *slotRules) { r.without.end = true }, over, 7},
		{"given back to the newest slot", 3, func(r *slotRules) { r.without.own = true }, over, 9},
		{"credit leaves nothing", 3, func(r *slotRules) { r.without.ahead = true }, over, 6},
		{"credit leaves it anywhere", 3, func(r *slotRules) { r.without.place = true }, over, 17},
		{"what is of another slot is taken off", 3, func(r *slotRules) { r.without.counting = true }, over, 10},
		{"reset forgets what is out", 3, func(r *slotRules) { r.without.reset = true }, over, 6},
		{"what was used is said later", 4, func(r *slotRules) { r.punctual, r.without.saying = true, true }, lost, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := slotRules{rate: test.rate}
			test.change(&r)
			found(t, test.breaks, test.in, func() ([]string, string, int) {
				return explore(slotState{}, r.next, r.broken)
			})
		})
	}
}

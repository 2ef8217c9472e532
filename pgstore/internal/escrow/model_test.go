package escrow_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// A model of a row that tokens are prefetched from, small enough to look at every state
// that it can be in, whatever is done in whatever order: whole tokens and ticks, a few
// leases, and all verbs. It is what the rule of this package comes from; each part of that is
// needed, as the model breaks without it.
//
// The rule. Beside its value and its instant a row knows ahead, how much of what was
// prefetched may still be used or come back, and until, the latest end of that. What is out
// at an instant is
//
//	out = ahead + rate · (until − now), not below 0; nothing if ahead is 0
//
// and of a fixed window, which is not refilled until all ends, ahead. A row must leave that
// free: until the end as much is refilled, and from then on the row refills as fast as
// leftovers lose their worth. So what is out of a bucket does not end at until: it fades.
//
//   - Whoever prefetches counts with a capacity that is lower by rate · H, and takes no more
//     than makes ahead that. The lease ends H after the row's instant, or with the window.
//   - What comes back, by whomever, fills the row to capacity − out at most. So do reset and
//     reshard.
//   - Leftovers are worth rate · (time since their end) less; those of a window that is over
//     are worth nothing. How much time that is, the process says as well, by a clock that is
//     not set back: to resume sets the row's instant to the clock's.
//   - With leftovers a process says what it used, and says that before, too. Both are taken off
//     ahead while they are counted in it for sure: until a grace after their end. Ahead counts
//     from 0 again when nothing is out, and the grace after until is over.

// rules are those of a model.
type rules struct {
	capacity, rate int8            // tokens; tokens a tick, or of a fixed window tokens in each
	period         int8            // of a fixed window; 0 of a token bucket
	lasts          [processes]int8 // H of each process; 0 if there is no such process
	grace          int8            // ticks after its end for which a lease is counted for sure
	verbs
	without without
}

const processes = 3

// verbs are what happens in a model besides taking, crediting, prefetching, using, saying
// and giving back.
type verbs struct {
	transactions bool // that take from memory, and are rolled back, or not
	kills        bool // of processes, and of statements on their way
	pauses       bool // and resumes
	edits        bool // reset and reshard
	clock        int8 // can be set back by as many ticks in all
	punctual     bool // nobody is killed or late, and what is used is said at once
}

// without is what is left out of the rule, to see what it is for.
type without struct {
	lowering bool // whoever prefetches counts with the capacity
	ahead    bool // what is out is rate · (until − now)
	out      bool // what comes back fills to the capacity
	fading   bool // nothing is out once until is over
	now      bool // what is out is that at the row's instant, which a pause sets ahead
	longest  bool // until is the end of the newest lease
	rowTime  bool // leases end H after the clock's instant, which may be before the row's
	late     bool // leftovers are worth as much after their end
	counting bool // leftovers and what was used are taken off ahead, counted or not
	once     bool // leftovers are returned again if it was not answered
	saying   bool // what was used is said later
	reset    bool // reset deletes the row
	reshard  bool // reshard fills to the capacity
	known    bool // how late leftovers are, the row's instant says, which a resume sets back
	edges    bool // reset and resume give a fixed window its own edges, before what is out has ended
}

// lease is what a process has prefetched with one statement. A process that is stopped
// does nothing for any number of ticks, as each can; one that is killed has nothing any more.
type lease struct {
	left, under, used int8 // in memory; with transactions under way; used and not said yet
	sent, said        int8 // on their way to the row: leftovers, and what was used
	end               int8 // in the row's time
	usable            int8 // ticks for which the process uses it, by its own clock,
	known             int8 // which says that it is that instant at least
}

func (l *lease) claim() int8 { return l.left + l.under + l.used + l.sent + l.said }

// state is the state of a model. Instants are counted from the database's now.
type state struct {
	value, ts    int8 // of the row, as it is stored
	paused       int8 // ticks until the pause is over
	ahead, until int8
	bound        int8 // see broken
	phase        int8 // ticks since the edge of a fixed window
	back         int8 // ticks by which the clock was set back
	leases       [processes]lease
}

// settled is what the row of a state holds, and the row's instant.
func (r *rules) settled(s *state, capacity int8) (value, t int8) {
	passed := max(0, -s.ts)
	if r.period > 0 {
		edges := passed / r.period
		return min(s.value+edges*r.rate, capacity), s.ts + edges*r.period
	}
	return min(s.value+passed*r.rate, capacity), max(s.ts, 0)
}

// out is what the row of a state must leave free.
func (r *rules) out(s *state) int8 {
	now := int8(0)
	if r.without.now {
		_, now = r.settled(s, r.capacity)
	}
	ahead := s.ahead
	switch over := s.until <= 0; {
	case r.without.out, ahead == 0, over && (r.period > 0 || r.without.fading):
		return 0
	case r.without.ahead:
		ahead = 0
	}
	if r.period > 0 {
		return ahead
	}
	return max(0, ahead+r.rate*(s.until-now))
}

// fill gives the row of a state n tokens, as far as what is out leaves room for them.
func (r *rules) fill(s *state, n int8) {
	value, t := r.settled(s, r.capacity)
	s.value, s.ts = max(value, min(value+n, r.capacity-r.out(s))), t
}

// forgets reports whether at t, the row's instant, nothing is out, and counted is false of
// all that was.
func (r *rules) forgets(s *state, t int8) bool {
	switch {
	case s.ahead == 0:
		return true
	case r.period > 0:
		return s.until <= t
	case r.without.fading:
		return s.until <= 0
	}
	return s.until+r.grace <= t && s.ahead <= r.rate*(t-s.until)
}

// outUntil reports whether a lease that ends then is part of ahead for sure.
func (r *rules) counted(end, t, known int8) bool {
	if r.period > 0 {
		return end == t+r.period && end > known
	}
	return end+r.grace > known
}

// worth is what n leftovers are worth when they are back.
func (r *rules) worth(n, end, t, known int8) int8 {
	switch {
	case r.without.late:
		return n
	case r.period > 0 && (end != t+r.period || end <= known):
		return 0
	case r.period > 0:
		return n
	}
	return max(0, n-r.rate*max(0, known-end))
}

// step is what is told of a step: what happened, and to which lease.
type step struct {
	what string
	to   int
}

// next calls visit with all states that can follow one.
func (r *rules) next(s state, visit func(step, state)) {
	do := func(what string, i int, change func(*state, *lease)) {
		to := s
		change(&to, &to.leases[max(i, 0)])
		r.tidy(&to)
		visit(step{what, i}, to)
	}
	r.pass(s, do)
	if r.pauses {
		r.pause(&s, do)
	}
	if r.edits {
		r.edit(&s, do)
	}
	value, t := r.settled(&s, r.capacity)
	if value > 0 && s.paused == 0 {
		do("take", -1, func(s *state, _ *lease) { s.value, s.ts, s.bound = value-1, t, s.bound-1 })
	}
	do("credit", -1, func(s *state, _ *lease) { r.fill(s, 1); s.bound = min(s.bound+1, r.capacity) })
	for i, lasts := range r.lasts {
		switch {
		case s.leases[i].claim() > 0:
			r.lease(s.leases[i], i, do)
		case lasts > 0 && s.paused == 0:
			r.prefetch(&s, i, do)
		}
	}
}

// doing has a change done to a copy of a state, and to one of its leases if i is not -1.
type doing = func(what string, i int, change func(*state, *lease))

// pass lets time pass, or sets the clock back.
func (r *rules) pass(s state, do doing) {
	for i := range s.leases {
		l := &s.leases[i]
		if l.end--; r.punctual && l.claim() > 0 && (l.end < 0 || r.period > 0 && l.end == 0) {
			return
		}
		l.usable = max(0, l.usable-1)
	}
	do("tick", -1, func(to *state, _ *lease) {
		to.ts, to.until, to.paused, to.leases = to.ts-1, to.until-1, max(0, to.paused-1), s.leases
		if r.period == 0 {
			to.bound = min(to.bound+r.rate, r.capacity)
			return
		}
		to.phase = (to.phase + 1) % r.period
		if to.ts == -r.period {
			to.bound = min(to.bound+r.rate, r.capacity)
		}
	})
	if s.back < r.clock {
		do("set the clock back", -1, func(s *state, _ *lease) {
			s.back, s.ts, s.until = s.back+1, s.ts+1, s.until+1
			if r.period > 0 {
				s.phase = (s.phase + r.period - 1) % r.period
			}
			for i := range s.leases {
				if l := &s.leases[i]; l.claim() > 0 {
					l.end, l.known = l.end+1, l.known+1
				}
			}
		})
	}
}

// pause pauses and resumes.
func (r *rules) pause(s *state, do doing) {
	value, t := r.settled(s, r.capacity)
	for _, until := range []int8{1, 2} {
		do("pause", -1, func(s *state, _ *lease) {
			s.value, s.ts, s.paused = min(value, 0), max(t, until-r.period), max(s.paused, until)
		})
	}
	if s.paused > 0 {
		do("resume", -1, func(s *state, _ *lease) { s.value, s.ts, s.paused = value, r.own(s), 0 })
	}
}

// own is the instant of a row without a pause: of a fixed window its own edge, but that
// nothing is refilled before what is out has ended.
func (r *rules) own(s *state) int8 {
	if r.period == 0 {
		return 0
	}
	if own := -s.phase; s.until <= 0 || r.without.edges {
		return own
	}
	return max(-s.phase, s.until-r.period)
}

// edit resets and reshards.
func (r *rules) edit(s *state, do doing) {
	value, t := r.settled(s, r.capacity)
	do("reset", -1, func(s *state, _ *lease) {
		own := r.own(s)
		if s.paused == 0 { // the row's instant is not set back, as its clock can be
			own = max(own, t)
		}
		if r.without.reset || r.forgets(s, own) {
			s.ahead = 0
		}
		s.value, s.ts, s.paused, s.bound = max(value, r.capacity-r.out(s)), own, 0, r.capacity
	})
	do("reshard", -1, func(s *state, _ *lease) { // the others had all that fits, or more
		n := r.capacity
		if r.fill(s, n); r.without.reshard {
			s.value = r.capacity
		}
		s.bound = min(s.bound+n, r.capacity)
	})
}

// prefetch is a statement that prefetches, for the process of a lease that is over. It may
// have been under way for a while, or its answer may be.
func (r *rules) prefetch(s *state, i int, do doing) {
	lowered := r.capacity
	if r.period == 0 && !r.without.lowering {
		lowered -= r.rate * r.lasts[i]
	}
	value, t := r.settled(s, lowered)
	end, usable := t+r.lasts[i], r.lasts[i]
	if r.without.rowTime {
		end = r.lasts[i]
	}
	if r.period > 0 {
		end = t + r.period
		usable = min(usable, end-max(t, 0))
	}
	ahead, until := s.ahead, s.until
	if r.forgets(s, t) {
		ahead, until = 0, end
	}
	if until = max(until, end); r.without.longest {
		until = end
	}
	for n := int8(1); n <= min(value, lowered-ahead); n++ {
		for slow := range min(usable, 2) {
			do("prefetch", i, func(s *state, l *lease) {
				s.value, s.ts, s.ahead, s.until = value-n, t, ahead+n, until
				*l = lease{left: n, end: end, usable: usable - slow, known: max(t, 0)}
			})
		}
	}
}

// lease is what happens to a lease.
func (r *rules) lease(l lease, i int, do doing) {
	if l.left > 0 && l.usable > 0 {
		do("use", i, func(s *state, l *lease) {
			if l.left, l.used, s.bound = l.left-1, l.used+1, s.bound-1; r.punctual && !r.without.saying {
				l.used, s.ahead = 0, s.ahead-1
			}
		})
		if r.transactions {
			do("begin", i, func(s *state, l *lease) { l.left--; l.under++; s.bound-- })
		}
	}
	if l.under > 0 { // rolled back when the lease is over, this is followed by a credit
		do("commit", i, func(_ *state, l *lease) { l.under--; l.used++ })
		if l.usable > 0 {
			do("roll back", i, func(s *state, l *lease) { l.under--; l.left++; s.bound = min(s.bound+1, r.capacity) })
		}
	}
	if l.sent+l.said > 0 {
		do("arrive", i, r.arrive)
		if r.without.once {
			do("arrive unanswered", i, func(s *state, l *lease) { sent := l.sent; r.arrive(s, l); l.sent = sent })
		}
	} else {
		if l.used > 0 {
			do("say", i, func(_ *state, l *lease) { l.said, l.used = l.used, 0 })
		}
		if l.left > 0 {
			do("give back", i, func(_ *state, l *lease) { l.sent, l.said, l.left, l.used = l.left, l.used, 0, 0 })
		}
	}
	if r.kills {
		do("kill", i, func(_ *state, l *lease) { l.left, l.under, l.used = 0, 0, 0 })
		do("lose", i, func(_ *state, l *lease) { l.sent, l.said = 0, 0 })
	}
}

// arrive is the statement at the row, now or later, by which a process gives back and says
// what it used.
func (r *rules) arrive(s *state, l *lease) {
	_, t := r.settled(s, r.capacity)
	known := max(t, l.known)
	if r.without.known {
		known = t
	}
	if r.counted(l.end, t, known) || r.without.counting {
		s.ahead = max(s.ahead-l.sent-l.said, 0)
	}
	if s.paused == 0 {
		r.fill(s, r.worth(l.sent, l.end, t, known))
	}
	l.sent, l.said = 0, 0
}

// tidy makes one state of those that are alike.
func (r *rules) tidy(s *state) {
	longest := max(r.capacity/r.rate, r.grace+1, r.period) + r.clock // after that nothing changes
	if r.clock == 0 || r.period > 0 {
		s.value, s.ts = r.settled(s, r.capacity)
	}
	s.ts = max(s.ts, -longest-1)
	if _, t := r.settled(s, r.capacity); s.ahead == 0 || s.paused == 0 && r.clock == 0 && r.forgets(s, t) {
		s.ahead, s.until = 0, 0
	}
	s.until = max(s.until, -longest)
	for i := range s.leases {
		l := &s.leases[i]
		if l.claim() == 0 {
			*l = lease{}
		}
		if l.left+l.under == 0 {
			l.usable = 0
		}
		l.end = max(l.end, -longest)
	}
	for i := 1; i < len(s.leases); i++ { // leases of one length are alike
		for j := i; j > 0 && r.lasts[j] == r.lasts[j-1] && less(&s.leases[j], &s.leases[j-1]); j-- {
			s.leases[j], s.leases[j-1] = s.leases[j-1], s.leases[j]
		}
	}
}

func less(a, b *lease) bool {
	return slices.Compare([]int8{a.left, a.under, a.used, a.sent, a.said, a.end, a.usable, a.known},
		[]int8{b.left, b.under, b.used, b.sent, b.said, b.end, b.usable, b.known}) < 0
}

// broken is what is wrong with a state, if anything is.
//
// The row and all that can still be used from memory are together never more than the
// capacity, now and just before the next tick.
//
// The bound is never below 0. It is a bucket of its own that begins full, refills as the
// limit says, and is lowered by each token that was granted and raised by each that somebody
// was told of and that came back. So it is the least, over all instants since, of the
// capacity plus what was refilled and came back from then on less what was granted: it is
// never below 0 if and only if in every stretch of the history no more was granted than that.
// Leftovers do not raise it, since nobody was told that they were granted.
//
// If nobody is killed or late, nothing is lost but what does not fit below the lowered
// capacity: the row and leftovers are together never less than the bound by more than is
// refilled in the longest lease, however often something was given back, and of a fixed
// window never less at all. And ahead is to the token what is out.
func (r *rules) broken(s state) string {
	if s.bound < 0 {
		return "more was granted than the limit lets in"
	}
	usable, leftovers, claims := int8(0), int8(0), int8(0)
	for i := range s.leases {
		l := &s.leases[i]
		if l.usable > 0 {
			usable += l.left + l.under
		}
		leftovers += l.left + l.sent
		claims += l.claim()
	}
	value, _ := r.settled(&s, r.capacity)
	soon := value
	if r.period == 0 && s.ts <= 0 {
		soon = min(value+r.rate, r.capacity)
	}
	if usable > 0 && soon+usable > r.capacity {
		return "row and memory hold more than the capacity"
	}
	if r.punctual {
		lost := s.bound - value - leftovers
		if r.period == 0 {
			lost -= r.rate * slices.Max(r.lasts[:])
		}
		if lost > 0 {
			return "something was lost"
		}
		if s.ahead != claims {
			return "ahead is not what is out"
		}
	}
	return ""
}

// explore looks at every state that can follow a start, and returns how it came to one
// that is broken, in the fewest steps, and why it is; nil if there is none.
func explore[S comparable](start S, next func(S, func(step, S)), broken func(S) string) (path []string, why string, states int) {
	type from struct {
		at int
		by step
	}
	seen, all, came := map[S]bool{start: true}, []S{start}, []from{{}}
	for at := 0; at < len(all); at++ {
		if why = broken(all[at]); why != "" {
			for ; at > 0; at = came[at].at {
				path = append(path, fmt.Sprintf("%s (%d): %+v", came[at].by.what, came[at].by.to, all[at]))
			}
			slices.Reverse(path)
			return path, why, len(all)
		}
		next(all[at], func(by step, to S) {
			if !seen[to] {
				seen[to] = true
				all, came = append(all, to), append(came, from{at, by})
			}
		})
	}
	return nil, "", len(all)
}

func TestModel(t *testing.T) {
	if testing.Short() {
		t.Skip("it goes through all states, which takes seconds")
	}
	bucket := rules{capacity: 4, rate: 1, lasts: [processes]int8{1, 1}, grace: 1}
	small := bucket
	small.capacity = 3
	window := rules{capacity: 3, rate: 2, period: 2, lasts: [processes]int8{2, 2}}
	const (
		over  = "row and memory hold more than the capacity"
		bound = "more was granted than the limit lets in"
		lost  = "something was lost"
		ahead = "ahead is not what is out"
	)
	for _, test := range []struct {
		name string
		rules
		change func(*rules)
		breaks string
		in     int // steps
	}{
		{"a token bucket", bucket, func(*rules) {}, "", 0},
		{"without a grace", bucket, func(r *rules) { r.grace = 0 }, "", 0},
		{"leases of two lengths", bucket, func(r *rules) { r.lasts[0] = 2 }, "", 0},
		{"three processes", small, func(r *rules) { r.lasts[2] = 1 }, "", 0},
		{"transactions and kills", bucket, func(r *rules) { r.transactions, r.kills, r.lasts[1] = true, true, 0 }, "", 0},
		{"transactions and kills beside others", small, func(r *rules) { r.transactions, r.kills = true, true }, "", 0},
		{"all edits", small, func(r *rules) { r.pauses, r.edits = true, true }, "", 0},
		{"a clock that is set back", small, func(r *rules) { r.edits, r.clock = true, 1 }, "", 0},
		{"pauses, and a clock that is set back", small, func(r *rules) { r.pauses, r.clock = true, 1 }, "", 0},
		{"a punctual bucket", bucket, func(r *rules) { r.punctual, r.capacity, r.lasts = true, 7, [processes]int8{2, 2} }, "", 0},
		{"punctual leases of two lengths", bucket, func(r *rules) { r.punctual, r.capacity, r.lasts = true, 7, [processes]int8{3, 1} }, "", 0},
		{"a fixed window", window, func(r *rules) {}, "", 0},
		{"a fixed window, transactions", window, func(r *rules) { r.transactions = true }, "", 0},
		{"a fixed window, kills", window, func(r *rules) { r.kills = true }, "", 0},
		{"a fixed window, all edits", window, func(r *rules) { r.pauses, r.edits, r.lasts[1] = true, true, 0 }, "", 0},
		{"a fixed window, a clock that is set back", window, func(r *rules) { r.edits, r.clock, r.lasts = true, 1, [processes]int8{1, 1} }, "", 0},
		{"a fixed window, pauses, and a clock that is set back", window, func(r *rules) { r.pauses, r.clock, r.lasts = true, 1, [processes]int8{1} }, "", 0},
		{"a punctual window", window, func(r *rules) {
			r.punctual, r.capacity, r.rate, r.period, r.lasts = true, 6, 4, 3, [processes]int8{3, 3}
		}, "", 0},

		{"prefetching from the whole capacity", bucket, func(r *rules) { r.without.lowering = true }, over, 1},
		{"filled without regard to ahead", bucket, func(r *rules) { r.without.ahead = true }, over, 2},
		{"filled to the capacity", bucket, func(r *rules) { r.without.out = true }, over, 2},
		{"nothing out after the end", bucket, func(r *rules) { r.without.fading, r.grace = true, 0 }, bound, 10},
		{"out at the end of a pause", small, func(r *rules) { r.without.now, r.pauses = true, true }, over, 4},
		{"until the end of the newest lease", bucket, func(r *rules) { r.without.longest, r.lasts[0] = true, 2 }, over, 6},
		{"ends by a clock that was set back, and out does not", small, func(r *rules) { r.without.rowTime, r.without.now, r.clock = true, true, 2 }, over, 5},
		{"late leftovers are worth as much", bucket, func(r *rules) { r.without.late = true }, bound, 10},
		{"what is not counted is taken off", bucket, func(r *rules) { r.without.counting = true }, over, 7},
		{"late by a clock that was set back, and the row with it", small, func(r *rules) { r.without.known, r.pauses, r.clock = true, true, 1 }, over, 10},
		{"returned again", bucket, func(r *rules) { r.without.once = true }, over, 5},
		{"reset deletes", small, func(r *rules) { r.without.reset, r.edits = true, true }, over, 2},
		{"reshard fills", small, func(r *rules) { r.without.reshard, r.edits = true, true }, over, 2},
		{"punctual without a grace", bucket, func(r *rules) { r.punctual, r.grace = true, 0 }, ahead, 4},
		{"what was used is said later", bucket, func(r *rules) { r.punctual, r.without.saying = true, true }, lost, 3},

		{"a fixed window filled to the capacity", window, func(r *rules) { r.without.out = true }, over, 2},
		{"a fixed window, late by a clock that was set back", window, func(r *rules) { r.without.known, r.pauses, r.clock, r.lasts = true, true, 1, [processes]int8{1} }, bound, 12},
		{"late leftovers of a fixed window", window, func(r *rules) { r.without.late = true }, bound, 9},
		{"what is of another window is taken off", window, func(r *rules) { r.without.counting = true }, over, 7},
		{"reset deletes a fixed window", window, func(r *rules) { r.without.reset, r.edits = true, true }, over, 2},
		{"own edges beside what is out", window, func(r *rules) { r.without.edges, r.pauses, r.edits = true, true, true }, over, 8},
		{"what was used of a fixed window is said later", window, func(r *rules) { r.punctual, r.without.saying = true, true }, lost, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := test.rules
			test.change(&r)
			found(t, test.breaks, test.in, func() ([]string, string, int) {
				return explore(state{value: r.capacity, bound: r.capacity}, r.next, r.broken)
			})
		})
	}
}

// found looks whether exploring a model finds that it breaks in so many steps, or that it
// does not, in states enough to tell.
func found(t *testing.T, breaks string, in int, explored func() (path []string, why string, states int)) {
	t.Helper()
	path, why, states := explored()
	t.Logf("%d states", states)
	if why != breaks || len(path) != in {
		t.Errorf("got %q in %d steps, want %q in %d:\n%s", why, len(path), breaks, in, strings.Join(path, "\n"))
	}
	if breaks == "" && states < 500 {
		t.Errorf("there are %d states only", states)
	}
}

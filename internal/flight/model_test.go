package flight

import (
	"fmt"
	"testing"
)

// A model of how three processes share the permits of two keys, gone through in every state: takes of
// all that is wanted at once; the turn of a key, in which one collects what is free and claims what is
// held; releases, which give a claimed permit to its claimer; and leases, claims and turns that end while
// their process stands still. See permit_collect.

const (
	processes = 3
	nobody    = 0
	gone      = processes + 1 // holds what was given to a turn that is over, and is the turn of old claims
)

type modelRow struct {
	holder, turn int8
	claimed      bool // by turn, while holder has it; otherwise it was collected in turn, if by any
}

type modelState struct {
	rows    [2][3]modelRow
	turns   [2]int8
	served  [processes + 1]bool
	settled [2]bool // the turn's process has collected since it has the turn
}

// model is what the processes want of each key, and which rules are left out.
type model struct {
	limit [2]int
	wants [processes + 1][2]int

	keepsMarks  bool // a take leaves the turn in the row
	manyCollect bool // the turn keeps nobody from collecting
	noClaims    bool // a release gives a claimed permit to nobody
	holdsSome   bool // a waiter for two keys takes what one has
}

type modelStep struct {
	next modelState
	name string
	by   int8
	ends bool // a lease, a claim or a turn
}

func (m *model) several(p int8) bool { return m.wants[p][0] > 0 && m.wants[p][1] > 0 }

func (s *modelState) count(m *model, k int, of func(modelRow) bool) (n int) {
	for _, r := range s.rows[k][:m.limit[k]] {
		if of(r) {
			n++
		}
	}
	return n
}

func heldBy(p int8) func(modelRow) bool { return func(r modelRow) bool { return r.holder == p } }

// take has a process take n free permits of a key.
func (s *modelState) take(m *model, p int8, k, n int) {
	for i := range s.rows[k][:m.limit[k]] {
		if r := &s.rows[k][i]; n > 0 && r.holder == nobody {
			r.holder = p
			if n--; !m.keepsMarks {
				r.turn, r.claimed = nobody, false
			}
		}
	}
}

// free frees a permit, or gives it to its claimer.
func (s *modelState) free(m *model, r *modelRow) {
	switch {
	case r.claimed && !m.noClaims:
		r.holder, r.claimed = r.turn, false
	default:
		*r = modelRow{}
	}
}

// over ends the turn of a key: nothing has its number again.
func (s *modelState) over(p int8, k int) {
	s.turns[k], s.settled[k] = nobody, false
	for i := range s.rows[k] {
		if r := &s.rows[k][i]; r.turn == p {
			r.turn = gone
		}
	}
}

// collect is a step of the process that has a key's turn. It returns an error if that takes another
// process's permit for its own.
func (s *modelState) collect(m *model, p int8, k int) error {
	mine := 0
	for i := range s.rows[k][:m.limit[k]] {
		r := &s.rows[k][i]
		switch {
		case r.holder == nobody && mine < m.wants[p][k]:
			*r = modelRow{holder: p, turn: p}
		case r.holder != nobody && r.turn == p && !r.claimed:
			if r.holder != p {
				return fmt.Errorf("process %d takes permit %d of process %d for its own", p, i, r.holder)
			}
		case r.holder != nobody && r.holder != p:
			r.turn, r.claimed = p, true
			continue
		default:
			continue
		}
		mine++
	}
	if s.settled[k] = true; mine < m.wants[p][k] {
		return nil
	}
	for i := range s.rows[k] {
		if r := &s.rows[k][i]; r.turn == p && r.claimed {
			r.turn, r.claimed = nobody, false
		} else if r.holder == p && mine > m.wants[p][k] {
			*r = modelRow{}
			mine--
		}
	}
	s.over(p, k)
	s.served[p] = true
	return nil
}

// steps returns all that can happen next.
func (m *model) steps(s modelState) (steps []modelStep, err error) {
	add := func(name string, by int8, ends bool, change func(*modelState)) {
		next := s
		if change(&next); next != s {
			steps = append(steps, modelStep{next, name, by, ends})
		}
	}
	for p := int8(1); p <= processes; p++ {
		if s.served[p] {
			add("release", p, false, func(n *modelState) { n.drop(m, p, true) })
		} else {
			m.waiting(s, p, add)
			if failed := m.collecting(s, p, add); failed != nil {
				err = failed
			}
		}
		add("stands still", p, true, func(n *modelState) { n.drop(m, p, false) })
	}
	for k := range s.rows {
		for i := range s.rows[k] {
			by := int8(gone)
			if r := s.rows[k][i]; r.holder != nobody && r.holder == s.turns[k] {
				by = r.holder
			}
			add("a lease or claim ends", by, true, func(n *modelState) {
				switch r := &n.rows[k][i]; {
				case r.holder == gone || r.holder != nobody && r.holder == n.turns[k]: // or one of a process that could not renew it
					r.holder = nobody
				case r.turn == gone:
					r.turn, r.claimed = nobody, false
				}
			})
		}
	}
	return steps, err
}

// drop has a process release its permits, or lose them and its turns as its leases end: then the rows
// are as they were, but for the end.
func (s *modelState) drop(m *model, p int8, release bool) {
	for k := range s.rows {
		for i := range s.rows[k] {
			if r := &s.rows[k][i]; r.holder == p && release {
				s.free(m, r)
			} else if r.holder == p {
				r.holder = nobody
			}
		}
		if s.turns[k] == p {
			s.over(p, k)
		}
	}
	s.served[p] = false
}

// waiting adds what a process does that waits: take all that it wants, if that is free.
func (m *model) waiting(s modelState, p int8, add func(string, int8, bool, func(*modelState))) {
	fits := true
	for k, n := range m.wants[p] {
		mine := s.count(m, k, heldBy(p))
		free := s.count(m, k, heldBy(nobody))
		if fits = fits && mine+free >= n; m.holdsSome && m.several(p) && mine < n && free > 0 {
			add("takes one of two keys", p, false, func(n *modelState) { n.take(m, p, k, 1) })
		}
	}
	if fits && (m.holdsSome || s.turns[0] != p && s.turns[1] != p) {
		add("takes", p, false, func(n *modelState) {
			for k, want := range m.wants[p] {
				n.take(m, p, k, want-s.count(m, k, heldBy(p)))
			}
			n.served[p] = true
		})
	}
}

// collecting adds what a process does that wants several permits of one key.
func (m *model) collecting(s modelState, p int8, add func(string, int8, bool, func(*modelState))) (err error) {
	for k, n := range m.wants[p] {
		if n < 2 || m.several(p) {
			continue
		}
		if m.manyCollect { // each takes what is free, and keeps it
			add("collects", p, false, func(next *modelState) {
				next.take(m, p, k, 1)
				next.served[p] = next.count(m, k, heldBy(p)) >= n
			})
			continue
		}
		if s.turns[k] == nobody {
			add("takes the turn", p, false, func(next *modelState) { next.turns[k] = p })
		}
		if s.turns[k] == p {
			add("collects", p, false, func(next *modelState) {
				if failed := next.collect(m, p, k); failed != nil {
					err = failed
				}
			})
		}
	}
	return err
}

// passedOver returns an error if a step of another leaves less to the process that collects: then it could
// be passed over for ever. What the end of a lease frees is whoever's comes first.
func (m *model) passedOver(s modelState, step modelStep) error {
	for k, p := range s.turns {
		if p == nobody || step.by == p || step.ends || !s.settled[k] || step.next.turns[k] != p {
			continue
		}
		mine := func(r modelRow) bool { return r.holder == p || r.claimed && r.turn == p && r.holder != nobody }
		if was, is := s.count(m, k, mine), step.next.count(m, k, mine); is < was {
			return fmt.Errorf("process %d has or claims %d permits of key %d, and after process %d %s %d", p, was, k, step.by, step.name, is)
		}
	}
	return nil
}

// check goes through all states, and returns how many there are. From each one, what is not the end of
// a lease leads to one in which a process is served that is not, for each process.
func (m *model) check() (states int, err error) {
	start := modelState{}
	seen := map[modelState][]modelStep{}
	before := map[modelState][]modelState{} // by steps that are not the end of a live process's lease
	for todo := []modelState{start}; len(todo) > 0; {
		s := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if _, ok := seen[s]; ok {
			continue
		}
		steps, err := m.steps(s)
		if err != nil {
			return len(seen), err
		}
		seen[s] = steps
		for _, step := range steps {
			if err := m.passedOver(s, step); err != nil {
				return len(seen), err
			}
			if !step.ends || step.by == gone {
				before[step.next] = append(before[step.next], s)
			}
			todo = append(todo, step.next)
		}
	}
	for p := 1; p <= processes; p++ {
		reached := map[modelState]bool{}
		var todo []modelState
		for s := range seen {
			if s.served[p] {
				todo = append(todo, s)
			}
		}
		for len(todo) > 0 {
			s := todo[len(todo)-1]
			if todo = todo[:len(todo)-1]; !reached[s] {
				reached[s] = true
				todo = append(todo, before[s]...)
			}
		}
		for s := range seen {
			if !reached[s] {
				return len(seen), fmt.Errorf("process %d is never served after %+v", p, s)
			}
		}
	}
	return len(seen), nil
}

var models = map[string]model{
	"two that want all, and one of two keys":  {limit: [2]int{2, 2}, wants: [4][2]int{{}, {2, 0}, {2, 0}, {1, 1}}},
	"one that wants all of each key":          {limit: [2]int{2, 2}, wants: [4][2]int{{}, {2, 0}, {0, 2}, {1, 1}}},
	"two that want two of three, and a third": {limit: [2]int{3, 1}, wants: [4][2]int{{}, {2, 0}, {2, 0}, {1, 0}}},
	"two of two keys, and one of all":         {limit: [2]int{2, 2}, wants: [4][2]int{{}, {1, 1}, {1, 1}, {2, 0}}},
	"two of two keys with one permit each":    {limit: [2]int{1, 1}, wants: [4][2]int{{}, {1, 1}, {1, 1}, {1, 0}}},
	"three, two and one of three":             {limit: [2]int{3, 1}, wants: [4][2]int{{}, {3, 0}, {2, 0}, {1, 1}}},
}

func TestModelOfWeights(t *testing.T) {
	for name, m := range models {
		states, err := m.check()
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if states < 4 {
			t.Errorf("%s: only %d states", name, states)
		}
		t.Logf("%s: %d states", name, states)
	}
}

// Each rule is needed: without it some model fails.
func TestModelOfWeightsNeedsItsRules(t *testing.T) {
	for name, without := range map[string]func(*model){
		"a take clears the turn in its row": func(m *model) { m.keepsMarks = true },
		"one at a time collects":            func(m *model) { m.manyCollect = true },
		"a claimed permit is given":         func(m *model) { m.noClaims = true },
		"nothing is held beside a wait":     func(m *model) { m.holdsSome = true },
	} {
		failed := false
		for _, m := range models {
			without(&m)
			_, err := m.check()
			failed = failed || err != nil
		}
		if !failed {
			t.Errorf("no model fails without the rule that %s", name)
		}
	}
}

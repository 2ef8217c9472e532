package decide

import (
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Snapshot is the rows of several calls as they were read. The calls are decided one after
// another, each on the states that those before it left.
type Snapshot struct {
	Rows        []Row               // in order
	Definitions []bucket.Definition // of the shard; of several, that with the largest capacity
	States      []bucket.State
	Found       []bool // that are there; a missing row is full
	Changed     []bool
	At          time.Time

	index   map[Row]int
	needed  []bool // to decide by
	assumed bool   // States has all rows, found or not
}

// NewSnapshot returns a snapshot of all rows of the calls, of which none has been found yet.
func NewSnapshot(calls []*Call) *Snapshot {
	definitions := make(map[Row]bucket.Definition, len(calls))
	for _, c := range calls {
		for i := range c.Demands {
			a := &c.Demands[i]
			share := a.Definition.Shard()
			for shard := range a.Definition.Shards {
				row := Row{a.KeyOf(), shard}
				if d, ok := definitions[row]; !ok || share.Capacity > d.Capacity {
					definitions[row] = *share
				}
			}
		}
	}
	s := &Snapshot{Rows: make([]Row, 0, len(definitions)), index: make(map[Row]int, len(definitions))}
	for row := range definitions {
		s.Rows = append(s.Rows, row)
	}
	slices.SortFunc(s.Rows, Row.Compare)
	s.Definitions = make([]bucket.Definition, len(s.Rows))
	for i, row := range s.Rows {
		s.Definitions[i], s.index[row] = definitions[row], i
	}
	s.Changed, s.needed = make([]bool, len(s.Rows)), make([]bool, len(s.Rows))
	return s
}

// Need notes the rows that are needed to decide a call, which changes were planned
// for: all, or of one that takes from the first limit that can grant, none after that.
func (s *Snapshot) Need(call *Call, changes []Change) {
	asks := call.Demands
	if call.First {
		asks = asks[:changes[0].Demand+1]
	}
	for i := range asks {
		for shard := range asks[i].Definition.Shards {
			s.needed[s.index[Row{asks[i].KeyOf(), shard}]] = true
		}
	}
}

// MissingOf returns the rows of a call that have not been found.
func (s *Snapshot) MissingOf(call *Call) (rows []Row) {
	for i := range call.Demands {
		a := &call.Demands[i]
		for shard := range a.Definition.Shards {
			if row := (Row{a.KeyOf(), shard}); !s.Found[s.index[row]] {
				rows = append(rows, row)
			}
		}
	}
	return rows
}

// Passes reports whether a call that takes from the first limit that can grant, and by changes
// takes from a later one, would do so by rows that were not found: the first could grant from
// those.
func (s *Snapshot) Passes(call *Call, changes []Change) bool {
	return call.First && s.MissingOf(&Call{Demands: call.Demands[:changes[0].Demand]}) != nil
}

// View returns the snapshot's rows of a call's limits.
func (s *Snapshot) View(call *Call) View {
	return s.view(call, func(a *Demand, n int) bucket.State {
		if s.Found[n] || s.assumed {
			return s.States[n]
		}
		d := a.Definition.Shard()
		return d.Fresh(a.Key, s.At)
	})
}

// bottom is less than any floor.
const bottom = -math.MaxFloat64 / 1e20

// Unlocked is View with nothing in the rows that were not found, so that nothing is
// planned to be taken from them.
func (s *Snapshot) Unlocked(call *Call) View {
	return s.view(call, func(*Demand, int) bucket.State { return bucket.State{Value: bottom, TS: s.At} })
}

func (s *Snapshot) view(call *Call, missing func(a *Demand, n int) bucket.State) View {
	view := View{States: make([][]bucket.State, len(call.Demands)), At: s.At}
	for i := range call.Demands {
		a := &call.Demands[i]
		view.States[i] = make([]bucket.State, a.Definition.Shards)
		for shard := range view.States[i] {
			n := s.index[Row{a.KeyOf(), shard}]
			if s.Found[n] {
				view.States[i][shard] = s.States[n]
			} else {
				view.States[i][shard] = missing(a, n)
			}
		}
	}
	return view
}

// Assume sets the rows that were not found to those of another snapshot, which has all of them.
func (s *Snapshot) Assume(of *Snapshot) {
	for i, row := range s.Rows {
		n := of.index[row]
		switch {
		case s.Found[i]:
		case of.Found[n]:
			s.States[i] = of.States[n]
		default:
			s.States[i] = of.Definitions[n].Fresh(row.Key.Key, s.At)
		}
	}
	s.assumed = true
}

// Apply makes changes on the snapshot.
func (s *Snapshot) Apply(changes []Change) {
	for i := range changes {
		n := s.index[changes[i].Row]
		s.States[n], s.Changed[n] = changes[i].After, true
	}
}

// Missing returns the rows of another snapshot that are needed and were not found on this
// one, which has all of them.
func (s *Snapshot) Missing(of *Snapshot) (rows []Row) {
	for _, row := range of.Rows {
		if n := s.index[row]; s.needed[n] && !s.Found[n] {
			rows = append(rows, row)
		}
	}
	return rows
}

// Changes returns the places of the rows that were changed.
func (s *Snapshot) Changes() (places []int) {
	for i, changed := range s.Changed {
		if changed {
			places = append(places, i)
		}
	}
	return places
}

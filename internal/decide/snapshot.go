package decide

import (
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Snapshot holds the rows of several calls. The calls are decided in turn, each on the states that
// the earlier ones left.
type Snapshot struct {
	Rows        []Row               // in order
	Definitions []bucket.Definition // of the shard; if calls differ, that with the largest capacity
	States      []bucket.State
	Found       []bool // which rows exist; a missing one is full
	Changed     []bool
	At          time.Time

	index   map[Row]int
	needed  []bool // which rows a decision needs
	assumed bool   // States is set for missing rows, too
}

// NewSnapshot returns a snapshot of all rows of the calls, without states.
func NewSnapshot(calls []*Call) *Snapshot {
	definitions := make(map[Row]bucket.Definition, len(calls))
	for _, c := range calls {
		for i := range c.Demands {
			a := &c.Demands[i]
			share := a.Definition.Shard()
			for _, row := range a.Rows() {
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

// Need notes the rows that decide a call, for which changes were planned. If the call takes from
// the first of several limits, rows of limits after the granted one are not needed.
func (s *Snapshot) Need(call *Call, changes []Change) {
	asks := call.Demands
	if call.First {
		asks = asks[:changes[0].Demand+1]
	}
	for i := range asks {
		for _, row := range asks[i].Rows() {
			s.needed[s.index[row]] = true
		}
	}
}

// MissingOf returns the call's rows that were not found.
func (s *Snapshot) MissingOf(call *Call) (rows []Row) {
	for i := range call.Demands {
		rows = append(rows, call.Demands[i].Rows()...)
	}
	return slices.DeleteFunc(rows, func(row Row) bool { return s.Found[s.index[row]] })
}

// Passes reports whether a call that takes from the first limit that can grant skips a limit whose
// rows were not all found. That limit could grant the call.
func (s *Snapshot) Passes(call *Call, changes []Change) bool {
	return call.First && len(s.MissingOf(&Call{Demands: call.Demands[:changes[0].Demand]})) > 0
}

// View returns the call's rows.
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

// Unlocked returns a view in which rows that were not found are empty, so that no plan takes from
// them.
func (s *Snapshot) Unlocked(call *Call) View {
	return s.view(call, func(*Demand, int) bucket.State { return bucket.State{Value: bottom, TS: s.At} })
}

func (s *Snapshot) view(call *Call, missing func(a *Demand, n int) bucket.State) View {
	view := View{States: make([][]bucket.State, len(call.Demands)), At: s.At}
	for i := range call.Demands {
		a := &call.Demands[i]
		view.States[i] = make([]bucket.State, a.Definition.Shards)
		for shard, row := range a.Rows() {
			n := s.index[row]
			if s.Found[n] {
				view.States[i][shard] = s.States[n]
			} else {
				view.States[i][shard] = missing(a, n)
			}
		}
	}
	return view
}

// Assume sets the rows that were not found to those of another snapshot, which must have all rows
// of s.
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

// Apply stores the rows that changes leave.
func (s *Snapshot) Apply(changes []Change) {
	for i := range changes {
		n := s.index[changes[i].Row]
		s.States[n], s.Changed[n] = changes[i].After, true
	}
}

// Missing returns the rows of another snapshot that s needs and has not found.
func (s *Snapshot) Missing(of *Snapshot) (rows []Row) {
	for _, row := range of.Rows {
		if n := s.index[row]; s.needed[n] && !s.Found[n] {
			rows = append(rows, row)
		}
	}
	return rows
}

// Changes returns the indexes of the changed rows.
func (s *Snapshot) Changes() (places []int) {
	for i, changed := range s.Changed {
		if changed {
			places = append(places, i)
		}
	}
	return places
}

package decide

import (
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Sheet is the rows of several calls, which are decided one after another, each on
// what those before it left.
type Sheet struct {
	Rows        []Row                  // in order
	Definitions []ratelimit.Definition // of the shard; of several, that with the largest capacity
	States      []ratelimit.State
	Found       []bool // that are there; what is not is full
	Changed     []bool
	At          time.Time

	index map[Row]int
}

// NewSheet is a sheet of all rows of the calls, of which none has been found yet.
func NewSheet(calls []*Call) *Sheet {
	definitions := make(map[Row]ratelimit.Definition, len(calls))
	for _, c := range calls {
		for i := range c.Asks {
			a := &c.Asks[i]
			share := a.Definition.Shard()
			for shard := range a.Definition.Shards {
				row := Row{a.Of(), shard}
				if d, ok := definitions[row]; !ok || share.Capacity > d.Capacity {
					definitions[row] = share
				}
			}
		}
	}
	s := &Sheet{Rows: make([]Row, 0, len(definitions)), index: make(map[Row]int, len(definitions))}
	for row := range definitions {
		s.Rows = append(s.Rows, row)
	}
	slices.SortFunc(s.Rows, Row.Compare)
	s.Definitions = make([]ratelimit.Definition, len(s.Rows))
	for i, row := range s.Rows {
		s.Definitions[i], s.index[row] = definitions[row], i
	}
	s.Changed = make([]bool, len(s.Rows))
	return s
}

// MissingOf returns the rows of a call that have not been found.
func (s *Sheet) MissingOf(call *Call) (rows []Row) {
	for i := range call.Asks {
		a := &call.Asks[i]
		for shard := range a.Definition.Shards {
			if row := (Row{a.Of(), shard}); !s.Found[s.index[row]] {
				rows = append(rows, row)
			}
		}
	}
	return rows
}

// View is what the sheet says of a call's limits.
func (s *Sheet) View(call *Call) View {
	view := View{States: make([][]ratelimit.State, len(call.Asks)), At: s.At}
	for i := range call.Asks {
		a := &call.Asks[i]
		view.States[i] = make([]ratelimit.State, a.Definition.Shards)
		for shard := range view.States[i] {
			if n := s.index[Row{a.Of(), shard}]; s.Found[n] || s.Changed[n] {
				view.States[i][shard] = s.States[n]
			} else {
				view.States[i][shard] = a.Definition.Shard().Fresh(a.Key, s.At)
			}
		}
	}
	return view
}

// Make makes changes on the sheet.
func (s *Sheet) Make(changes []Change) {
	for i := range changes {
		n := s.index[changes[i].Row]
		s.States[n], s.Changed[n] = changes[i].After, true
	}
}

// DefinitionOf is the definition of a row, which must be on the sheet.
func (s *Sheet) DefinitionOf(row Row) ratelimit.Definition {
	return s.Definitions[s.index[row]]
}

// Fill returns the rows of another sheet that were not found on this one, which has
// all of them.
func (s *Sheet) Fill(of *Sheet) (rows []Row, definitions []ratelimit.Definition) {
	for i, row := range of.Rows {
		if !s.Found[s.index[row]] {
			rows, definitions = append(rows, row), append(definitions, of.Definitions[i])
		}
	}
	return rows, definitions
}

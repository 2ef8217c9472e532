package table

import (
	"fmt"
	"slices"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Decision is rows to lock, and the function that decides on them.
type Decision struct {
	Rows        []decide.Row        // in order
	Definitions []bucket.Definition // of the rows' shards
	Missing     []decide.Row        // some of Rows, to be made before they are locked: full, which means the same
	Await       *decide.Row         // one of Rows, to be made if it is missing, and waited for; nil for none

	// Decide is called once, with the rows that are locked as found. It sets the States of the
	// rows that it changes, and returns their places.
	Decide func(read *Rows) (changed []int, err error)

	// OnLocked is called with each of Missing that somebody else has made and not committed.
	OnLocked func(decide.Row)
}

// decide decides, and returns the rows that were changed, in order.
func (d *Decision) decide(rows *Rows) ([]int, error) {
	changed, err := d.Decide(rows)
	if err != nil {
		return nil, err
	}
	slices.Sort(changed)
	for _, n := range changed {
		if !rows.Found[n] {
			return nil, fmt.Errorf("row %v is to be written and was not locked", rows.Rows[n])
		}
	}
	return changed, nil
}

// definitionsOf is the definitions of some of a decision's rows.
func (d *Decision) definitionsOf(rows []decide.Row) []bucket.Definition {
	of := make(map[decide.Row]*bucket.Definition, len(d.Rows))
	for i, row := range d.Rows {
		of[row] = &d.Definitions[i]
	}
	definitions := make([]bucket.Definition, len(rows))
	for i, row := range rows {
		definitions[i] = *of[row]
	}
	return definitions
}

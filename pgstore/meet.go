package pgstore

import (
	"context"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// A key that this process has not met lately may have no row, or too little: for a limiter by
// address that is usual. So a lone call for it takes and reads in one round trip, and if there
// is no row, makes one as the call leaves it in another.

// meet decides a call for a new key. It reports whether it did: not if the row is locked, or
// must be to decide the call.
func (e *engine) meet(ctx context.Context, t *ticket) (done bool, err error) {
	p := t.Value
	a := &p.call.Demands[0]
	e.single(p)
	g := table.Grant{Change: a.Change(0, 0, a.Count), Need: a.Count + p.floor}
	rows := table.Rows{Rows: []decide.Row{p.row}}
	sent := e.sending([]*ticket{t})
	if err := e.table.Meet(ctx, e.pool, &g, &rows, e.clock()); err != nil {
		if code(err) == lockNotAvailable {
			return false, nil
		}
		return false, e.fault("take", err)
	}
	if g.Taken.OK {
		p.entry.Note(g.Count, 1)
		e.tellGroup([]*ticket{t}, &g, nil)
		return true, nil
	}
	state := rows.States[0]
	if !rows.Found[0] {
		state = a.Definition.Fresh(a.Key, rows.At)
	}
	view := decide.View{States: [][]bucket.State{{state}}, At: rows.At.UTC()}
	changes, ok := p.call.Plan(view)
	switch {
	case !ok:
		p.refused(view, sent)
		p.result = p.call.Checked(view)
	case rows.Found[0]:
		return false, nil
	default:
		made, err := e.table.Make(ctx, e.pool, p.row, changes[0].After)
		if err != nil && code(err) != lockNotAvailable {
			return false, e.fault("make", err)
		}
		if !made {
			return false, nil
		}
		p.entry.Note(a.Count, 1)
		p.result = e.granted(&p.call, changes, view.At, "", nil)
	}
	t.Finish()
	return true, nil
}

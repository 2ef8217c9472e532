package engine

import (
	"context"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Probe lets tests of the packages above decide calls together and look at the queues of rows.
type Probe struct{ *Engine }

// DecideAll decides calls together, and returns the calls with locked rows. await is the row that
// they wait for; nil for none.
func (p Probe) DecideAll(ctx context.Context, tickets []*Ticket, granting bool, await *decide.Row) (locked []*Ticket) {
	return p.decideAll(ctx, tickets, granting, awaitedRow(await))
}

// Server returns a function that decides calls as one queue does, one batch after another.
func (p Probe) Server(await *decide.Row) func(ctx context.Context, tickets []*Ticket) {
	q := new(queue)
	return func(ctx context.Context, tickets []*Ticket) { p.serve(ctx, q, tickets, awaitedRow(await)) }
}

// Groups returns the groups of calls that are granted together, their grants, and the other calls.
func (p Probe) Groups(tickets []*Ticket) (groups [][]*Ticket, grants []table.Grant, left []*Ticket) {
	return p.groups(new(grouping), tickets)
}

// Waits returns the row that a call waits for; nil for none.
func (p *Pending) Waits() *decide.Row { return p.locked.Load() }

func awaitedRow(row *decide.Row) *awaited {
	if row == nil {
		return nil
	}
	return &awaited{row: *row}
}

// UnderWay returns the number of calls under way.
func (p Probe) UnderWay() int64 { return p.parts.underWay.Load() }

package tx

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// incarnationKey is the key under which a connection keeps its server's incarnation.
const incarnationKey = "ratelimit.incarnation"

// incarnation returns the incarnation of a connection's server. It reads it once for each
// connection. After an error it returns "", which no server has.
func incarnation(ctx context.Context, conn *pgxpool.Conn) (known string, err error) {
	data := conn.Conn().PgConn().CustomData()
	known, ok := data[incarnationKey].(string)
	if !ok {
		if known, err = table.Server(ctx, conn); err == nil {
			data[incarnationKey] = known
		}
	}
	return known, err
}

const (
	askPause = 5 * time.Millisecond // the first pause before the server is asked again
	askSlow  = time.Second          // the longest such pause
	askLong  = time.Second          // how long to ask, even after the deadline
)

// resolve reads the outcome of a transaction with a lost COMMIT. It returns nil if the transaction
// was committed.
func (a *attempt) resolve(ctx context.Context, lost error) error {
	left := askLong
	if deadline, ok := ctx.Deadline(); ok {
		left += max(0, time.Until(deadline))
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), left)
	defer cancel()
	unknown := fmt.Errorf("%w: %w", conn.ErrOutcomeUnknown, lost)
	for pause := askPause; ; pause = min(2*pause, askSlow) {
		became, err := a.readOutcome(ctx)
		switch {
		case err == nil && became == table.Committed:
			return nil
		case err == nil && became == table.Aborted:
			return fmt.Errorf("pgstore: the transaction was rolled back: %w", lost)
		case err == nil && became == table.Forgotten:
			return unknown
		}
		if conn.Sleep(ctx, pause) != nil { // it is still in progress, or there is no server yet
			return unknown
		}
	}
}

// readOutcome reads the outcome of the transaction on a new connection.
//
// A commit is believed only in the same incarnation of the same server. If the server crashed, an
// open transaction may have left nothing in the log. Then its ID is given to another transaction,
// which may commit. In another incarnation the row itself is read. It proves the commit if no
// transaction has written it since.
func (a *attempt) readOutcome(ctx context.Context) (became string, err error) {
	xid := a.taken.taken[0].Xid
	err = a.taker.Pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		if became, err = table.Outcome(ctx, conn, xid, false); err != nil || became != table.Committed {
			return err
		}
		now, err := table.Server(ctx, conn)
		if err == nil && now != "" && now == a.incarnation {
			return nil
		}
		wrote := false
		if err == nil && len(a.taken.changes) > 0 {
			wrote, err = a.taker.table.Wrote(ctx, conn, &a.taken.changes[0], xid)
		}
		if err == nil && !wrote {
			became = table.Forgotten
		}
		return err
	})
	return became, err
}

package table

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// A transaction with others in line behind it frees its row before it is on disk. Afterwards the
// commit of an empty message in the log waits for the disk, and no call is answered before that. A
// transaction that takes the row meanwhile comes later in the log. A crash, or a standby, only
// loses the end of the log.
const awaitDiskSQL = conn.AwaitDisk

// freesEarly reports whether transactions can free their rows early: the server has the function
// for messages, and the role may call it. It remembers that answer. It does not remember other
// errors.
func (t *Table) freesEarly(ctx context.Context, pooled *pgxpool.Conn) (bool, error) {
	if known := t.early.Load(); known != nil {
		return *known, nil
	}
	_, err := pooled.Exec(ctx, awaitDiskSQL)
	may := err == nil
	denied := slices.Contains([]string{"42501", "42883", "0A000"}, conn.Code(err)) // insufficient_privilege, undefined_function, feature_not_supported
	switch {
	case may || denied:
		t.early.Store(&may)
	case !intx.Answered(err):
		return false, err
	}
	return may, nil
}

// commit is the COMMIT of a batch.
type commit struct {
	early bool // the transaction frees its row before it is on disk
	done  bool // COMMIT was answered; with early, it may not be on disk
}

func (c *commit) queue(batch *pgx.Batch) {
	batch.Queue("COMMIT").Exec(func(pgconn.CommandTag) error {
		c.done = true
		return nil
	})
	if c.early {
		batch.Queue(awaitDiskSQL)
	}
}

// fault returns the error of a batch that was sent on conn. An error of the server after COMMIT is
// about the message. The connection may have forgotten its statement, as after DEALLOCATE ALL, so
// the message is sent again, unprepared. If that is refused too, it is unknown whether the
// transaction is on disk. The error then hides the server's error from errors.As, so that callers
// do not take it for one of a transaction that did nothing. Whether rows can be freed early is
// asked again then.
func (t *Table) fault(ctx context.Context, conn *pgxpool.Conn, c *commit, err error) error {
	var refused *pgconn.PgError
	if !c.done || !errors.As(err, &refused) {
		return err
	}
	if _, err = conn.Exec(ctx, awaitDiskSQL, pgx.QueryExecModeSimpleProtocol); err == nil {
		return nil
	}
	if !conn.Conn().IsClosed() { // otherwise the server went away, and answers as before when it is back
		t.early.Store(nil)
	}
	return fmt.Errorf("committed, and perhaps not on disk: %v", err)
}

package table

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// A transaction with others in line behind it frees its row before it is on disk. After that the
// commit of an empty message in the log waits for the disk, and no call is answered before. A
// transaction that has the row meanwhile is later in the log, of which a crash, or a standby, loses
// only the end.
const awaitDiskSQL = conn.AwaitDisk

// freesEarly reports whether transactions can free their rows early: the server has the message,
// and the role may use it. That is remembered; what any other error says is not.
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
	case !conn.Answered(err):
		return false, err
	}
	return may, nil
}

// commit is the end of a transaction in a batch.
type commit struct {
	early bool // the transaction frees its row before it is on disk
	done  bool // and may not be on disk
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

// fault returns the error of a batch that conn was sent. An error of the server after COMMIT is
// about the message, which a connection may have forgotten, as after DEALLOCATE ALL: it is sent
// again, unprepared. Where it is refused, it is unknown whether the transaction is on disk. Callers
// are not to take the error for one of a transaction that did nothing, so they do not find it by
// errors.As. Whether rows can be freed early is asked again then.
func (t *Table) fault(ctx context.Context, conn *pgxpool.Conn, c *commit, err error) error {
	var refused *pgconn.PgError
	if !c.done || !errors.As(err, &refused) {
		return err
	}
	if _, err = conn.Exec(ctx, awaitDiskSQL, pgx.QueryExecModeSimpleProtocol); err == nil {
		return nil
	}
	if !conn.Conn().IsClosed() { // or the server went away, and is as it was when it is back
		t.early.Store(nil)
	}
	return fmt.Errorf("committed, and perhaps not on disk: %v", err)
}

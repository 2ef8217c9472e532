package pgstore_test

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/sqltx"
)

// overSQL is a transaction of database/sql, or a savepoint of one, that the tests of pgx's
// run in as well.
type overSQL struct {
	pgx.Tx // of package sqltx
	tx     *sql.Tx
	depth  int // of the savepoint
}

func beginSQL(ctx context.Context, db *pgtest.DB, options pgx.TxOptions) (pgx.Tx, error) {
	levels := map[pgx.TxIsoLevel]sql.IsolationLevel{
		pgx.ReadCommitted: sql.LevelReadCommitted, pgx.RepeatableRead: sql.LevelRepeatableRead, pgx.Serializable: sql.LevelSerializable,
	}
	tx, err := stdlib.OpenDBFromPool(db.Pool).BeginTx(ctx, &sql.TxOptions{Isolation: levels[options.IsoLevel]})
	if err != nil {
		return nil, err
	}
	return overSQL{sqltx.Of(tx), tx, 0}, nil
}

func (o overSQL) Session() (any, map[string]any) {
	return o.Tx.(interface{ Session() (any, map[string]any) }).Session()
}

func (o overSQL) exec(ctx context.Context, query string) error {
	_, err := o.tx.ExecContext(ctx, fmt.Sprintf(query, o.depth))
	return err
}

func (o overSQL) Begin(ctx context.Context) (pgx.Tx, error) {
	o.depth++
	return o, o.exec(ctx, "SAVEPOINT test_%d")
}

func (o overSQL) Commit(ctx context.Context) error {
	if o.depth > 0 {
		return o.exec(ctx, "RELEASE SAVEPOINT test_%d")
	}
	return o.tx.Commit()
}

func (o overSQL) Rollback(ctx context.Context) error {
	if o.depth > 0 {
		return o.exec(ctx, "ROLLBACK TO SAVEPOINT test_%d")
	}
	return o.tx.Rollback()
}

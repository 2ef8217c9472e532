// Package sqltx lets a store's verbs take in a transaction of database/sql, or of a library built
// on it (GORM, Bun, ent, sqlc), with pgx's driver or lib/pq.
//
//	tx, err := db.BeginTx(ctx, nil)
//	...
//	result, err := store.AllowTx(ctx, sqltx.Of(tx), SendMessage.For(userID))
//
// The tokens are spent if and only if the transaction commits, as with pgx.
package sqltx

import (
	"context"
	"database/sql"
	"errors"
	"reflect"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit"
)

// Tx has the methods that [Of] needs of a transaction. *sql.Tx has them; a *sql.Conn with an open
// transaction; GORM's Statement.ConnPool; ent's Tx with the feature sql/execquery; sqlc's DBTX. Of
// a bun.Tx pass the *sql.Tx inside, since Bun rewrites queries.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// Of returns tx for the verbs of a *pgstore.Store that end in Tx, at any isolation level and behind
// savepoints. Call it once for a transaction and pass the result to each verb: a second step on a
// limit with shards then stays on the shard of the first, and does not deadlock. Like tx, it is not
// safe for concurrent use.
//
// A value without an open transaction, such as a *sql.DB, takes nothing: the verb returns
// [ratelimit.ErrInvalid], and for a nil tx too. If tx lacks the methods Commit and Rollback, Of
// asks the server whether a transaction is open, in two statements.
//
// pgx sends several statements at once; database/sql sends one after another. So a call for several
// limits, or a refused one, takes as many round trips.
//
// Errors of the server are the driver's, with a method SQLState. After 40001 and 40P01 run the
// whole transaction again. The other methods of the returned pgx.Tx, such as Commit, return
// [errors.ErrUnsupported]: call tx itself.
func Of(tx Tx) pgx.Tx {
	if v := reflect.ValueOf(tx); tx == nil || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil
	}
	_, ends := tx.(interface {
		Commit() error
		Rollback() error
	})
	return &transaction{tx: tx, begun: ends, types: pgtype.NewMap(), data: map[string]any{}}
}

type transaction struct {
	tx    Tx
	begun bool // it is known to be a transaction
	types *pgtype.Map
	data  map[string]any
}

// Session returns a value that identifies the transaction, and the data that a store keeps with it.
func (t *transaction) Session() (id any, data map[string]any) {
	if reflect.ValueOf(t.tx).Comparable() {
		return t.tx, t.data
	}
	return t, t.data
}

// ready returns an error unless there is a transaction.
func (t *transaction) ready(ctx context.Context) error {
	if t.begun {
		return nil
	}
	for _, query := range []string{"SAVEPOINT ratelimit_begun", "RELEASE SAVEPOINT ratelimit_begun"} {
		if _, err := t.tx.ExecContext(ctx, query); err != nil {
			if state := interface{ SQLState() string }(nil); errors.As(err, &state) && state.SQLState() == "25P01" { // no_active_sql_transaction
				return &ratelimit.FieldError{Package: "sqltx", Field: "Tx", Value: reflect.TypeOf(t.tx).String(), Reason: "must be a transaction"}
			}
			return err
		}
	}
	t.begun = true
	return nil
}

// texts returns arguments as texts, which every driver and query mode accepts, since the statements
// name their types.
func (t *transaction) texts(args []any) ([]any, error) {
	texts := make([]any, len(args))
	for i, arg := range args {
		of, ok := t.types.TypeForValue(arg)
		if arg == nil || !ok { // NULL, or for the driver to refuse
			texts[i] = arg
			continue
		}
		text, err := t.types.Encode(of.OID, pgtype.TextFormatCode, arg, []byte{}) // nil is NULL
		if err != nil {
			return nil, err
		}
		if text != nil {
			texts[i] = string(text)
		}
	}
	return texts, nil
}

func (t *transaction) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	texts, err := t.texts(args)
	if err == nil {
		err = t.ready(ctx)
	}
	if err == nil {
		_, err = t.tx.ExecContext(ctx, query, texts...)
	}
	return pgconn.CommandTag{}, err
}

func (t *transaction) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	r := &rows{types: t.types}
	var texts []any
	if texts, r.err = t.texts(args); r.err == nil {
		r.err = t.ready(ctx)
	}
	if r.err == nil {
		r.rows, r.err = t.tx.QueryContext(ctx, query, texts...)
	}
	return r, r.err
}

func (t *transaction) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	r, _ := t.Query(ctx, query, args...) // which has the error
	return row{r}
}

func (t *transaction) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return &results{of: t, ctx: ctx, left: b.QueuedQueries}
}

// Conn returns nil, since pgx has none.
func (t *transaction) Conn() *pgx.Conn { return nil }

func (t *transaction) LargeObjects() pgx.LargeObjects { return pgx.LargeObjects{} }

func (t *transaction) Begin(context.Context) (pgx.Tx, error) { return nil, errUnsupported }
func (t *transaction) Commit(context.Context) error          { return errUnsupported }
func (t *transaction) Rollback(context.Context) error        { return errUnsupported }

func (t *transaction) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	return 0, errUnsupported
}

func (t *transaction) Prepare(context.Context, string, string) (*pgconn.StatementDescription, error) {
	return nil, errUnsupported
}

var errUnsupported = &unsupported{}

type unsupported struct{}

func (*unsupported) Error() string {
	return "sqltx: this pgx.Tx is for the verbs of a store; use the transaction itself"
}

func (*unsupported) Is(target error) bool { return target == errors.ErrUnsupported }

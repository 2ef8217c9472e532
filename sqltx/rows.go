package sqltx

import (
	"context"
	"database/sql"
	"errors"
	"reflect"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// rows is the answer to one statement.
type rows struct {
	rows  *sql.Rows // nil when the statement failed
	err   error
	types *pgtype.Map
}

func (r *rows) Next() bool { return r.rows != nil && r.err == nil && r.rows.Next() }

// Close reads the answer to its end. A statement that has returned rows can still fail there.
func (r *rows) Close() {
	if r.rows == nil {
		return
	}
	for r.rows.Next() {
	}
	err := errors.Join(r.rows.Err(), r.rows.Close())
	if r.rows = nil; r.err == nil {
		r.err = err
	}
}

func (r *rows) Err() error {
	if r.err == nil && r.rows != nil {
		return r.rows.Err()
	}
	return r.err
}

func (r *rows) Scan(dest ...any) error {
	if r.rows == nil {
		return r.err
	}
	targets := make([]any, len(dest))
	for i, d := range dest {
		targets[i] = d
		if v := reflect.ValueOf(d); v.Kind() == reflect.Pointer && v.Type().Elem().Kind() == reflect.Slice { // an array, which drivers return as text
			targets[i] = r.types.SQLScanner(d)
		}
	}
	err := r.rows.Scan(targets...)
	if err != nil {
		r.err = err
		r.Close()
	}
	return err
}

func (r *rows) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (r *rows) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (r *rows) Values() ([]any, error)                       { return nil, errUnsupported }
func (r *rows) RawValues() [][]byte                          { return nil }
func (r *rows) Conn() *pgx.Conn                              { return nil }
func (r *rows) TypeMap() *pgtype.Map                         { return r.types }

// row is the first row of an answer.
type row struct{ rows pgx.Rows }

func (r row) Scan(dest ...any) error {
	defer r.rows.Close()
	if !r.rows.Next() {
		if r.rows.Close(); r.rows.Err() != nil {
			return r.rows.Err()
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// results holds the answers to a batch. Each statement is sent when its answer is asked for; after
// an error no further one is sent.
type results struct {
	of   *transaction
	ctx  context.Context
	left []*pgx.QueuedQuery
	err  error
}

// next returns the next statement, nil when there is none to send.
func (r *results) next() *pgx.QueuedQuery {
	if r.err == nil && len(r.left) == 0 {
		r.err = errEnded
	}
	if r.err != nil {
		return nil
	}
	next := r.left[0]
	r.left = r.left[1:]
	return next
}

var errEnded = errors.New("sqltx: the batch has no more statements")

func (r *results) Exec() (tag pgconn.CommandTag, err error) {
	next := r.next()
	if next == nil {
		return tag, r.err
	}
	tag, r.err = r.of.Exec(r.ctx, next.SQL, next.Arguments...)
	return tag, r.err
}

func (r *results) Query() (pgx.Rows, error) {
	next := r.next()
	if next == nil {
		return &rows{err: r.err}, r.err
	}
	answer, err := r.of.Query(r.ctx, next.SQL, next.Arguments...)
	r.err = err
	return answer, err
}

func (r *results) QueryRow() pgx.Row {
	answer, _ := r.Query() // which has the error
	return row{answer}
}

// Close sends the statements that are left and calls their functions.
func (r *results) Close() error {
	for r.err == nil && len(r.left) > 0 {
		if fn := r.left[0].Fn; fn != nil {
			if err := fn(r); err != nil {
				r.err = err
			}
		} else {
			_, _ = r.Exec() // which keeps the error
		}
	}
	return r.err
}

// Tx returns nil: a batch begins no transaction here.
func (r *results) Tx() pgx.Tx { return nil }

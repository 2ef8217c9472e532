package catalog

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// rows reads and writes the rows of a catalog: in a table, or in memory, which ignores the
// transaction.
type rows interface {
	// lock waits until no other edit is under way. No other begins until unlock, or the end of the
	// transaction.
	lock(ctx context.Context, tx pgx.Tx) (unlock func(), err error)

	// as names the author of the later changes in a transaction.
	as(ctx context.Context, tx pgx.Tx, who string) error

	// rowsOf reads the rows of names: those without a key, and those of one key.
	rowsOf(ctx context.Context, tx pgx.Tx, names []string, key string) (*reading, error)
	publish(ctx context.Context, tx pgx.Tx, p *published) error
	set(ctx context.Context, tx pgx.Tx, e *Entry) error
	unset(ctx context.Context, tx pgx.Tx, at place) error
	forget(ctx context.Context, tx pgx.Tx, name string) (int64, error)

	history(ctx context.Context, name string, key *string, most int) ([]Change, error)
	pruneHistory(ctx context.Context, age time.Duration) (int64, error)
}

type whoKey struct{}

// WithWho returns a context for Set, Publish and the other edits of a [Catalog]. It names the
// author of the change, such as the person who is signed in, for the history, beside PostgreSQL's
// role. The name is not checked. An edit is [ratelimit.ErrInvalid] if who is longer than 255 bytes,
// or not valid UTF-8. In a caller's transaction it holds until that ends.
//
// In SQL, SET LOCAL ratelimit.who = 'ann' does the same.
func WithWho(ctx context.Context, who string) context.Context {
	return context.WithValue(ctx, whoKey{}, who)
}

func whoOf(ctx context.Context) string {
	who, _ := ctx.Value(whoKey{}).(string)
	return who
}

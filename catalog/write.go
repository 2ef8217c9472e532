package catalog

import (
	"context"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/intx"
)

// rows are the rows of a catalog: a table, or memory, which ignores the transaction.
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

// mostWho is the greatest length of an author's name in bytes, about that of a limit's name.
const mostWho = 255

// writer returns the rows for edits in tx, with the author from the context.
func (c *Catalog) writer(ctx context.Context, tx pgx.Tx) (rows, error) {
	to, err := c.inTx(tx)
	if err != nil {
		return nil, err
	}
	switch who := whoOf(ctx); {
	case who == "":
		return to, nil
	case len(who) > mostWho || !utf8.ValidString(who) || strings.ContainsRune(who, 0):
		return nil, invalid("Who", strings.ToValidUTF8(who[:min(len(who), mostWho)], "?"), "must have at most 255 bytes, of UTF-8 without zero bytes")
	default:
		return to, to.as(ctx, tx, who)
	}
}

// alone runs do in a transaction of its own. Afterwards this process sees its changes at once.
func (c *Catalog) alone(ctx context.Context, do func(context.Context, pgx.Tx) error) error {
	if err := c.usable(); err != nil {
		return err
	}
	if err := c.transact(ctx, do); err != nil {
		return err
	}
	_ = c.Refresh(ctx) // the change is committed; another reading will see it
	return nil
}

// transact runs do in a transaction of its own, for Config.Timeout at most if ctx has no deadline.
func (c *Catalog) transact(ctx context.Context, do func(context.Context, pgx.Tx) error) error {
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	if c.memory != nil {
		return do(ctx, nil)
	}
	return intx.Do(ctx, c.table.pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return do(ctx, tx) })
}

// write waits until no other edit is under way, reads the rows of an edit, and writes what the edit makes
// of them. If that differs from agreed, which may be nil, it returns ErrChanged.
func (c *Catalog) write(ctx context.Context, tx pgx.Tx, name, key string, by *Override, agreed *Edit) (Edit, error) {
	to, err := c.writer(ctx, tx)
	if err != nil {
		return Edit{}, err
	}
	unlock, err := to.lock(ctx, tx)
	if err != nil {
		return Edit{}, err
	}
	defer unlock()
	r, err := to.rowsOf(ctx, tx, []string{name}, key)
	if err != nil {
		return Edit{}, err
	}
	v, _ := (*view)(nil).with(r, time.Now())
	made, err := v.edited(name, key, by)
	switch {
	case err != nil:
		return Edit{}, err
	case agreed != nil && (!sameOverride(made.Was, agreed.Was) || !sameOverride(made.Became, agreed.Became)):
		return Edit{}, ErrChanged
	case !made.Changes():
		return made, nil
	case made.Became == nil:
		return made, to.unset(ctx, tx, place{name, key})
	}
	return made, to.set(ctx, tx, &Entry{Name: name, Key: key, Override: *made.Became})
}

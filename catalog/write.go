package catalog

import (
	"context"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/intx"
)

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

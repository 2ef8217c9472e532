package catalog

import (
	"context"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

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

// writer returns the editor for edits in tx, with the author from the context.
func (c *Catalog) writer(ctx context.Context, tx pgx.Tx) (editor, error) {
	to, err := c.inTx(tx)
	if err != nil {
		return nil, err
	}
	who, _ := ctx.Value(whoKey{}).(string)
	switch {
	case who == "":
		return to, nil
	case len(who) > mostWho || !utf8.ValidString(who) || strings.ContainsRune(who, 0):
		return nil, invalid("Who", strings.ToValidUTF8(who[:min(len(who), mostWho)], "?"), "must have at most 255 bytes, of UTF-8 without zero bytes")
	}
	return to, to.as(ctx, who)
}

// mostWho is the greatest length of an author's name in bytes, about that of a limit's name.
const mostWho = 255

package catalog

import (
	"context"
	"iter"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// Store is the part of a store by which edits keep what was used: a *pgstore.Store on the same
// database and schema, or a *memstore.Store.
type Store interface {
	CheckEach(ctx context.Context, requests ...ratelimit.Request) ([]ratelimit.Status, error)
	Rows(ctx context.Context, limit ratelimit.Limit, page ratelimit.Page) iter.Seq2[ratelimit.Status, error]
	ReplaceTx(ctx context.Context, tx pgx.Tx, replacements ...ratelimit.Replacement) ([]ratelimit.Status, error)
	ReplaceFunc(ctx context.Context, requests []ratelimit.Request, do func(context.Context, pgx.Tx) error) error
}

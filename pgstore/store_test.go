package pgstore_test

import (
	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var _ ratelimit.TxStore[pgx.Tx] = (*pgstore.Store)(nil)

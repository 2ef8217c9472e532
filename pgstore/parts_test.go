package pgstore_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
)

// inTwoParts returns db with connections that find a table in two parts, as Citus would say, by a
// function that waits for an advisory lock.
func inTwoParts(t *testing.T, db *pgtest.DB, sent *traced.Statements) *pgtest.DB {
	t.Helper()
	_, err := db.Pool.Exec(t.Context(), "CREATE FUNCTION "+db.Schema+".get_shard_id_for_distribution_column(regclass, text) RETURNS bigint LANGUAGE sql "+
		"AS $$ SELECT (ascii($2) % 2)::bigint FROM (SELECT pg_advisory_xact_lock_shared(hashtext('"+db.Schema+"'))) AS waited $$")
	must(t, err)
	config, err := pgxpool.ParseConfig(db.URL)
	must(t, err)
	config.MaxConns, config.ConnConfig.Tracer, config.ConnConfig.RuntimeParams["search_path"] = 4, sent, db.Schema
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	return &pgtest.DB{URL: db.URL, Schema: db.Schema, Pool: pool}
}

// Calls for rows of one part share statements once more of them are under way than half of the pool has
// connections; a row that is locked or short keeps none of the others waiting, and each is granted what its
// row has.
func TestPartsShareStatements(t *testing.T) {
	t.Parallel()
	const callers, alone = 60, 2
	for _, late := range []bool{false, true} { // a row that is not known to be locked is among them
		t.Run(fmt.Sprint("late ", late), func(t *testing.T) {
			db, sent := pgtest.New(t), &traced.Statements{}
			store := newStore(t, inTwoParts(t, db, sent), portable)
			limit, few := slow("l", 1000), slow("few", 2)
			mustAllow(t, store, limit.For("held"))
			mustAllow(t, store, limit.For("late"))
			holder, asked := begin(t, db, pgx.ReadCommitted), begin(t, db, pgx.ReadCommitted)
			mustExec(t, holder, "SELECT FROM "+db.Schema+".rate_limits FOR UPDATE")
			mustExec(t, asked, "SELECT pg_advisory_xact_lock(hashtext('"+db.Schema+"'))")
			var granted atomic.Int64
			allow := func(r ratelimit.Request) {
				result, err := store.Allow(t.Context(), r)
				should(t, err)
				if result.OK {
					granted.Add(1)
				}
			}
			var held, others sync.WaitGroup
			for range alone {
				held.Go(func() { allow(limit.For("held")) })
			}
			eventually(t, "as many are under way as go alone", func() bool { return store.UnderWay() == alone })
			if late {
				held.Go(func() { allow(limit.For("late")) })
			}
			for i := range callers {
				others.Go(func() { allow(limit.ForN(fmt.Sprint(i), float64(1+i%3))) })
			}
			for range 3 {
				others.Go(func() { allow(few.For("k")) })
			}
			eventually(t, "all are under way", func() bool { return store.UnderWay() >= alone+callers+3 })
			sent.Reset()
			rollBack(t, asked)
			others.Wait() // while the rows are locked
			if n := granted.Load(); n != callers+2 {
				t.Errorf("granted %d, want all but one of three for 2 tokens", n)
			}
			if n := sent.Sends(); !late && n > callers/2 {
				t.Errorf("%d statements for %d rows", n, callers)
			}
			rollBack(t, holder)
			held.Wait()
			for i := range callers {
				wantLeft(t, store, limit.ForN(fmt.Sprint(i), 0), float64(1000-1-i%3))
			}
			wantLeft(t, store, limit.ForN("held", 0), 1000-1-alone)
		})
	}
}

func rollBack(t *testing.T, tx pgx.Tx) {
	t.Helper()
	must(t, tx.Rollback(t.Context()))
}

package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

const (
	fewConns  = 4  // for decisions that are combined
	manyConns = 16 // for all else
)

const (
	startTimeout = 5 * time.Minute // an image may have to be pulled
	closeTimeout = 30 * time.Second
)

// tablesSQL makes the tables that are not ours. They have the storage parameters that keep ours
// small, too.
const tablesSQL = `
CREATE TABLE naive_limits (
	name text, key text, tokens float8 NOT NULL, ts timestamptz NOT NULL, PRIMARY KEY (name, key)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 50, autovacuum_vacuum_scale_factor = 0.05);
CREATE TABLE counters (
	name text, key text, n bigint NOT NULL, PRIMARY KEY (name, key)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 50, autovacuum_vacuum_scale_factor = 0.05);
CREATE TABLE work (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text NOT NULL);
`

// postgresServer is a server with a schema of our own on it.
type postgresServer struct {
	server *throwaway.Server
	counts *counts
	schema string
	conns  int // in many and hasty; 0 for manyConns
	few    *pgxpool.Pool
	many   *pgxpool.Pool
	hasty  *pgxpool.Pool // commits do not wait for the disk
}

// startPostgres starts a server whose commits wait for the disk.
func startPostgres(ctx context.Context) (_ *postgresServer, err error) {
	starting, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	server, err := throwaway.StartWith(starting, throwaway.Options{Fsync: true, Settings: map[string]string{"max_connections": "400"}})
	if err != nil {
		return nil, err
	}
	p := &postgresServer{server: server, counts: &counts{}, schema: "ratelimit_bench_" + strings.ToLower(rand.Text()[:12])}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if err := p.openPools(); err != nil {
		return nil, err
	}
	return p, p.makeTables(ctx)
}

func (p *postgresServer) openPools() (err error) {
	if p.few, err = p.newPool(fewConns, "on"); err != nil {
		return err
	}
	many := int32(cmp.Or(p.conns, manyConns))
	if p.many, err = p.newPool(many, "on"); err != nil {
		return err
	}
	p.hasty, err = p.newPool(many, "off")
	return err
}

func (p *postgresServer) closePools() {
	for _, pool := range []*pgxpool.Pool{p.few, p.many, p.hasty} {
		if pool != nil {
			pool.Close()
		}
	}
}

// newPool makes a pool of connections that have our schema first in the search_path, and count.
func (p *postgresServer) newPool(conns int32, synchronousCommit string) (*pgxpool.Pool, error) {
	return lab.NewPool(p.server.URL, conns, func(config *pgxpool.Config) {
		config.ConnConfig.DialFunc, config.ConnConfig.Tracer = p.counts.dial, &p.counts.statements
		maps.Copy(config.ConnConfig.RuntimeParams, map[string]string{
			"search_path": p.schema, "application_name": p.schema, "synchronous_commit": synchronousCommit,
		})
		standard := config.ConnConfig.OnPgError
		config.ConnConfig.OnPgError = func(conn *pgconn.PgConn, err *pgconn.PgError) bool {
			if lab.AskedToRetry(err) {
				p.counts.retries.Add(1)
			}
			return standard(conn, err)
		}
	})
}

func (p *postgresServer) makeTables(ctx context.Context) error {
	sql := "CREATE SCHEMA " + p.schema + ";" + migrations.UpSQL() + tablesSQL
	if _, err := p.many.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("making the tables: %w", err)
	}
	return nil
}

// close drops the schema, for the case that the server is not ours to stop, and
// stops it otherwise.
func (p *postgresServer) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	var err error
	if p.many != nil {
		if _, err = p.many.Exec(ctx, "DROP SCHEMA IF EXISTS "+p.schema+" CASCADE"); err != nil {
			err = fmt.Errorf("dropping the schema: %w", err)
		}
	}
	p.closePools()
	return errors.Join(err, p.server.Close())
}

func (p *postgresServer) facts(ctx context.Context) (string, error) {
	var version, fsync, commit, delay string
	err := p.many.QueryRow(ctx,
		`SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit'), current_setting('commit_delay')`).
		Scan(&version, &fsync, &commit, &delay)
	if err != nil {
		return "", fmt.Errorf("asking for the version: %w", err)
	}
	return fmt.Sprintf("PostgreSQL %s, fsync %s, synchronous_commit %s, commit_delay %s µs", version, fsync, commit, delay), nil
}

// fill gives every key a row in one of the tables.
func (p *postgresServer) fill(ctx context.Context, sql string, w workload, args ...any) error {
	if _, err := p.many.Exec(ctx, sql, append([]any{w.limit.Name, w.keys}, args...)...); err != nil {
		return fmt.Errorf("filling a table: %w", err)
	}
	return nil
}

// tokens returns the tokens that a key has to begin with.
func (w workload) tokens() float64 {
	if w.empty {
		return 0
	}
	return w.limit.Definition().Capacity
}

// fillOurs makes the rows of unsharded limits. Those of sharded ones are made
// by the first calls.
func (p *postgresServer) fillOurs(ctx context.Context, w workload) error {
	if w.limit.Shards > 1 {
		return nil
	}
	return p.fill(ctx, `INSERT INTO rate_limits (name, key, shard, value, ts)
SELECT $1::text, k, 0, $3::float8, clock_timestamp() FROM unnest($2::text[]) AS k
ON CONFLICT DO NOTHING`, w, w.tokens())
}

// ours is a way of using a store.
type ours struct {
	portable bool
	escrow   time.Duration
	hasty    bool // its commits do not wait for the disk
}

func openOurs(o ours) opener {
	return func(ctx context.Context, e *env, w workload) (contender, error) {
		if err := e.postgres.fillOurs(ctx, w); err != nil {
			return contender{}, err
		}
		store, err := o.newStore(e.postgres)
		if err != nil {
			return contender{}, err
		}
		c := contender{close: store.Close, decide: func(ctx context.Context, key string) (bool, error) {
			result, err := store.Allow(ctx, w.limit.For(key))
			return result.OK, err
		}}
		return c, c.empty(ctx, w)
	}
}

func (o ours) newStore(p *postgresServer) (*pgstore.Store, error) {
	pool := p.few
	switch {
	case o.hasty:
		pool = p.hasty
	case o.portable:
		pool = p.many
	}
	return pgstore.New(pool, &pgstore.Config{Portable: o.portable, Escrow: o.escrow})
}

// openPermits takes a permit, and releases it.
func openPermits(o ours) opener {
	return func(_ context.Context, e *env, w workload) (contender, error) {
		store, err := o.newStore(e.postgres)
		if err != nil {
			return contender{}, err
		}
		limit := ratelimit.InFlight{Name: w.limit.Name, Limit: w.permits, Lease: permitLease}
		decide := func(ctx context.Context, key string) (bool, error) {
			permit, err := store.Permits().Acquire(ctx, limit.For(key))
			if err != nil || !permit.OK {
				return false, err
			}
			return true, store.Permits().Release(ctx, permit)
		}
		return contender{decide: decide, close: store.Close}, nil
	}
}

const countSQL = `INSERT INTO counters AS c VALUES ($1::text, $2::text, 1)
ON CONFLICT (name, key) DO UPDATE SET n = c.n + excluded.n RETURNING n`

const workSQL = `INSERT INTO work (body) VALUES ($1::text)`

// openWork opens what does one piece of work under a limit of a store. A refusal is no error.
func openWork(ctx context.Context, e *env, w workload, config *pgstore.Config, do func(ctx context.Context, store *pgstore.Store, key string) error) (contender, error) {
	if err := e.postgres.fillOurs(ctx, w); err != nil {
		return contender{}, err
	}
	store, err := pgstore.New(e.postgres.many, config)
	if err != nil {
		return contender{}, err
	}
	decide := func(ctx context.Context, key string) (bool, error) {
		err := do(ctx, store, key)
		if errors.Is(err, ratelimit.ErrRefused) {
			return false, nil
		}
		return err == nil, err
	}
	return contender{decide: decide, close: store.Close}, nil
}

func openOursTx(shards int, escrow time.Duration) opener {
	return func(ctx context.Context, e *env, w workload) (contender, error) {
		w.limit.Shards = shards
		return openWork(ctx, e, w, &pgstore.Config{Escrow: escrow}, func(ctx context.Context, store *pgstore.Store, key string) error {
			_, err := store.AllowFunc(ctx, []ratelimit.Request{w.limit.For(key)},
				func(tx pgx.Tx, _ ratelimit.Result) error {
					_, err := tx.Exec(ctx, workSQL, key)
					return err
				})
			return err
		})
	}
}

// openCaller is a transaction of the caller's at READ COMMITTED, which takes in a round trip before
// the work.
func openCaller(take func(ctx context.Context, store *pgstore.Store, tx pgx.Tx, request ratelimit.Request) error) opener {
	return func(ctx context.Context, e *env, w workload) (contender, error) {
		return openWork(ctx, e, w, nil, func(ctx context.Context, store *pgstore.Store, key string) error {
			return inTx(ctx, e.postgres.many, pgx.ReadCommitted, func(tx pgx.Tx) error {
				err := take(ctx, store, tx, w.limit.For(key))
				if err == nil {
					_, err = tx.Exec(ctx, workSQL, key)
				}
				return err
			})
		})
	}
}

// takeOurs takes, and upsertKey writes the row of the key and decides nothing: the lower bound.
func takeOurs(ctx context.Context, store *pgstore.Store, tx pgx.Tx, request ratelimit.Request) error {
	result, err := store.AllowTx(ctx, tx, request)
	return cmp.Or(err, result.Err())
}

func upsertKey(ctx context.Context, _ *pgstore.Store, tx pgx.Tx, request ratelimit.Request) error {
	_, err := tx.Exec(ctx, countSQL, ratelimit.NameOf(request.Limit), request.Key)
	return err
}

// openOursOnCommit is the work in the round trip of BEGIN and the take in that of COMMIT, at READ
// COMMITTED: at SERIALIZABLE whoever comes second at a row runs again.
func openOursOnCommit(ctx context.Context, e *env, w workload) (contender, error) {
	return openWork(ctx, e, w, nil, func(ctx context.Context, store *pgstore.Store, key string) error {
		_, err := store.AllowOnCommit(ctx, []ratelimit.Request{w.limit.For(key)}, pgx.ReadCommitted, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, workSQL, key)
			return err
		})
		return err
	})
}

// openOursBatch is the work and the take in one batch, which a pool sends as one transaction, at READ
// COMMITTED: nobody runs again, and refusals, which make pgx prepare again, are not what it is for.
func openOursBatch(ctx context.Context, e *env, w workload) (contender, error) {
	return openWork(ctx, e, w, nil, func(ctx context.Context, store *pgstore.Store, key string) error {
		var batch pgx.Batch
		batch.Queue(workSQL, key)
		if _, err := store.QueueTake(&batch, w.limit.For(key)); err != nil {
			return err
		}
		return e.postgres.many.SendBatch(ctx, &batch).Close()
	})
}

// openNoLimit is the transaction and its work alone.
func openNoLimit(_ context.Context, e *env, _ workload) (contender, error) {
	decide := func(ctx context.Context, key string) (bool, error) {
		err := inTx(ctx, e.postgres.many, pgx.Serializable, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, workSQL, key)
			return err
		})
		return err == nil, err
	}
	return contender{decide: decide}, nil
}

// openPlainUpdate is the fastest that PostgreSQL can do with a statement for
// each decision.
func openPlainUpdate(ctx context.Context, e *env, w workload) (contender, error) {
	const fill = `INSERT INTO counters SELECT $1::text, k, 0 FROM unnest($2::text[]) AS k ON CONFLICT DO NOTHING`
	if err := e.postgres.fill(ctx, fill, w); err != nil {
		return contender{}, err
	}
	const update = `UPDATE counters SET n = n + 1 WHERE name = $1::text AND key = $2::text`
	decide := func(ctx context.Context, key string) (bool, error) {
		_, err := e.postgres.many.Exec(ctx, update, w.limit.Name, key)
		return err == nil, err
	}
	return contender{decide: decide}, nil
}

// analyze runs ANALYZE, as autovacuum would within a minute, at the same moment for all.
func (p *postgresServer) analyze(ctx context.Context) error {
	if _, err := p.many.Exec(ctx, "ANALYZE rate_limits, naive_limits, counters, work"); err != nil {
		return fmt.Errorf("analyzing the tables: %w", err)
	}
	return nil
}

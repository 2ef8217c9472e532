package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/lab"
)

// naive is a limit written by hand, in a transaction with one INSERT: read the tokens, decide in the
// program, write them back.
type naive struct {
	lock         bool // FOR UPDATE
	serializable bool // and run again at once when PostgreSQL asks for it
}

func openNaive(n naive) opener {
	return func(ctx context.Context, e *env, w workload) (contender, error) {
		const fill = `INSERT INTO naive_limits SELECT $1::text, k, $3::float8, clock_timestamp() FROM unnest($2::text[]) AS k
ON CONFLICT DO NOTHING`
		if err := e.postgres.fill(ctx, fill, w, w.tokens()); err != nil {
			return contender{}, err
		}
		level := pgx.ReadCommitted
		if n.serializable {
			level = pgx.Serializable
		}
		decide := func(ctx context.Context, key string) (granted bool, err error) {
			err = inTx(ctx, e.postgres.many, level, func(tx pgx.Tx) error {
				granted, err = n.take(ctx, tx, w, key)
				if err != nil || !granted {
					return err
				}
				_, err = tx.Exec(ctx, workSQL, key)
				return err
			})
			return granted && err == nil, err
		}
		return contender{decide: decide}, nil
	}
}

// inTx runs do in a transaction, and again at once for as long as PostgreSQL
// asks for it.
func inTx(ctx context.Context, pool *pgxpool.Pool, level pgx.TxIsoLevel, do func(pgx.Tx) error) error {
	for {
		err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, do)
		if err == nil || !lab.AskedToRetry(err) || ctx.Err() != nil {
			return err
		}
	}
}

func (n naive) take(ctx context.Context, tx pgx.Tx, w workload, key string) (bool, error) {
	sql := `SELECT tokens, ts FROM naive_limits WHERE name = $1::text AND key = $2::text`
	if n.lock {
		sql += ` FOR UPDATE`
	}
	var tokens float64
	var ts time.Time
	if err := tx.QueryRow(ctx, sql, w.limit.Name, key).Scan(&tokens, &ts); err != nil {
		return false, err
	}
	d, elapsed := w.limit.Definition(), max(0, time.Since(ts))
	tokens = min(d.Capacity, tokens+d.Rate*float64(elapsed)/float64(d.Period))
	if tokens < 1 {
		return false, nil
	}
	const update = `UPDATE naive_limits SET tokens = $3::float8, ts = $4::timestamptz WHERE name = $1::text AND key = $2::text`
	_, err := tx.Exec(ctx, update, w.limit.Name, key, tokens-1, ts.Add(elapsed))
	return err == nil, err
}

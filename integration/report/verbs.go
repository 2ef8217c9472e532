package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// verb is a verb that takes, in its forms.
type verb struct {
	own   func(context.Context, ...ratelimit.Request) (ratelimit.Result, error)
	inTx  func(context.Context, pgx.Tx, ...ratelimit.Request) (ratelimit.Result, error)
	inRun func(context.Context, []ratelimit.Request, func(pgx.Tx, ratelimit.Result) error) (ratelimit.Result, error) // nil if there is none
}

func allow(s *pgstore.Store) verb   { return verb{s.Allow, s.AllowTx, s.AllowFunc} }
func reserve(s *pgstore.Store) verb { return verb{s.Reserve, s.ReserveTx, s.ReserveFunc} }
func first(s *pgstore.Store) verb   { return verb{s.AllowFirst, s.AllowFirstTx, nil} }
func wait(s *pgstore.Store) verb    { return verb{s.Wait, s.ReserveTx, nil} }

func atMost(s *pgstore.Store) verb {
	return verb{
		own: func(ctx context.Context, rs ...ratelimit.Request) (ratelimit.Result, error) {
			return s.AllowAtMost(ctx, rs[0])
		},
		inTx: func(ctx context.Context, tx pgx.Tx, rs ...ratelimit.Request) (ratelimit.Result, error) {
			return s.AllowAtMostTx(ctx, tx, rs[0])
		},
	}
}

// take returns the verb that tells an error, and so has no receipt.
func take(s *pgstore.Store) verb {
	return verb{
		own: func(ctx context.Context, rs ...ratelimit.Request) (ratelimit.Result, error) {
			return taken(rs, s.Take(ctx, rs...))
		},
		inTx: func(ctx context.Context, tx pgx.Tx, rs ...ratelimit.Request) (ratelimit.Result, error) {
			return taken(rs, s.TakeTx(ctx, tx, rs...))
		},
	}
}

// taken returns what the error of take says.
func taken(rs []ratelimit.Request, err error) (result ratelimit.Result, _ error) {
	if err != nil {
		return result, unlessRefused(err)
	}
	result.OK = true
	for _, r := range rs {
		result.Several = append(result.Several, ratelimit.Status{Request: r, Taken: r.Count})
	}
	return result, nil
}

// unlessRefused is err, but no error for a refusal.
func unlessRefused(err error) error {
	if errors.Is(err, ratelimit.ErrRefused) {
		return nil
	}
	return err
}

// somehow takes on its own, in a transaction, or in the runner. What those hold stays
// locked for a while.
func (v verb) somehow(ctx context.Context, r *rand.Rand, pool *pgxpool.Pool, hold time.Duration, request ratelimit.Request) (result ratelimit.Result, err error) {
	form := r.IntN(4)
	switch {
	case form == 0:
		err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) (err error) {
			result, err = v.inTx(ctx, tx, request)
			time.Sleep(hold)
			return err
		})
		return result, err
	case form == 1 && v.inRun != nil:
		result, err = v.inRun(ctx, []ratelimit.Request{request}, func(pgx.Tx, ratelimit.Result) error {
			time.Sleep(hold)
			return nil
		})
		return result, unlessRefused(err)
	}
	return v.own(ctx, request)
}

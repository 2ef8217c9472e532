package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// crossedForms are the ways in which calls take that are told of a threshold. Where some do not
// see all that was taken, the figures may be any, as the documentation says.
var crossedForms = []struct {
	name   string
	config pgstore.Config
	shards int
	take   func(context.Context, *pgxpool.Pool, *pgstore.Store, ratelimit.Request) (ratelimit.Result, error)
	told   bool // of crossings that are only reported, and need not be once
}{
	{name: "in the caller's transaction", take: allowInTx},
	{name: "in the caller's transaction, portable", config: pgstore.Config{Portable: true}, take: allowInTx},
	{name: "in the runner's transaction", take: allowInRun},
	{name: "on their own, combined", take: allowOwn},
	{name: "on their own, combined, portable", config: pgstore.Config{Portable: true}, take: allowOwn},
	{name: "from memory", config: pgstore.Config{Escrow: briefly}, take: allowOwn, told: true},
	{name: "from memory, in the runner's transaction", config: pgstore.Config{Escrow: briefly}, take: allowInRun, told: true},
	{name: "on their own, of 4 shards", shards: 4, take: allowOwn, told: true},
}

func allowOwn(ctx context.Context, _ *pgxpool.Pool, s *pgstore.Store, r ratelimit.Request) (ratelimit.Result, error) {
	return s.Allow(ctx, r)
}

func allowInRun(ctx context.Context, _ *pgxpool.Pool, s *pgstore.Store, r ratelimit.Request) (ratelimit.Result, error) {
	result, err := s.AllowFunc(ctx, []ratelimit.Request{r}, func(pgx.Tx, ratelimit.Result) error { return nil })
	return result, unlessRefused(err)
}

func allowInTx(ctx context.Context, pool *pgxpool.Pool, s *pgstore.Store, r ratelimit.Request) (result ratelimit.Result, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		result, err = s.AllowTx(ctx, tx, r)
		return err
	})
	return result, err
}

// attackCrossed has calls of two stores use a quota by the calendar up, and counts who is told
// that a share of it is crossed.
func attackCrossed(ctx context.Context, l *site, c *chapter) error {
	const callers = 32
	calls := 100_000
	if l.quick {
		calls = 2_000
	}
	c.say("%d goroutines of two stores use up a yearly quota of %d calls in each form. They count how often calls report that a half, four fifths and all of it are used. COMMIT does not wait for the disk here.", callers, calls)
	for _, form := range crossedForms {
		schema, err := l.schema(ctx)
		if err != nil {
			return err
		}
		pool, err := newPool(l.server.URL, callers, func(config *pgxpool.Config) {
			config.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
		})
		if err != nil {
			return err
		}
		p := place{schema: schema, pool: pool}
		for range 2 {
			if _, err := p.store(form.config); err != nil {
				return err
			}
		}
		quota := ratelimit.FixedWindow{Name: form.name, Rate: float64(calls), Every: ratelimit.Year, Zone: "Europe/Berlin", Shards: form.shards}
		begun := time.Now()
		told, granted, err := useUp(calls, callers, func(i int) (ratelimit.Result, error) {
			return form.take(ctx, pool, p.stores[i%2], quota.For(""))
		})
		took := time.Since(begun)
		p.close()
		if err != nil {
			return fmt.Errorf("%s: %w", form.name, err)
		}
		text := fmt.Sprintf("%v times of a half, four fifths and all, in %d grants and %.0f s", told, granted, took.Seconds())
		if form.told {
			c.Tell(form.name+", told", "%s", text)
			continue
		}
		c.Add(form.name+", told", text, "[1 1 1]", told == [3]int64{1, 1, 1})
		c.AtLeast(form.name+", granted", float64(granted), float64(calls), "")
	}
	return nil
}

// useUp makes calls at once, and returns how many were told that the shares are crossed, and how
// many were granted.
func useUp(calls, callers int, take func(i int) (ratelimit.Result, error)) (told [3]int64, granted int64, err error) {
	var crossed [3]atomic.Int64
	var grants, left atomic.Int64
	left.Store(int64(calls))
	err = lab.Each(callers, func(i int) error {
		for left.Add(-1) >= 0 {
			result, err := take(i)
			if err != nil {
				return err
			}
			if result.OK {
				grants.Add(1)
			}
			for n, share := range []float64{0.5, 0.8, 1} {
				if result.Crossed(share) {
					crossed[n].Add(1)
				}
			}
		}
		return nil
	})
	for n := range crossed {
		told[n] = crossed[n].Load()
	}
	return told, grants.Load(), err
}

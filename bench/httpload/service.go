package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// service is the service, its database, and how many checks held so far.
type service struct {
	server     *throwaway.Server
	pool       *pgxpool.Pool
	store      *pgstore.Store
	escrow     *pgstore.Store // takes ahead
	schema     string
	checks     int
	limitsMade int
}

const maxConns = 16

func start(ctx context.Context) (s *service, err error) {
	server, err := throwaway.StartWith(ctx, throwaway.Options{Fsync: true})
	if err != nil {
		return nil, err
	}
	s = &service{server: server, schema: "ratelimit_httpload_" + strings.ToLower(rand.Text()[:12])}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	config, err := pgxpool.ParseConfig(server.URL)
	if err != nil {
		return nil, err
	}
	config.MaxConns = maxConns
	config.ConnConfig.RuntimeParams["search_path"] = s.schema
	if s.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return nil, err
	}
	sql := "CREATE SCHEMA " + s.schema + ";" + migrations.UpSQL() + "; CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL)"
	if _, err = s.pool.Exec(ctx, sql); err != nil {
		return nil, err
	}
	if s.store, err = pgstore.New(s.pool, nil); err != nil {
		return nil, err
	}
	s.escrow, err = pgstore.New(s.pool, &pgstore.Config{Escrow: 100 * time.Millisecond})
	return s, err
}

func (s *service) close() error {
	var err error
	if s.pool != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		_, err = s.pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+s.schema+" CASCADE")
		s.pool.Close()
	}
	return errors.Join(err, s.server.Close())
}

func (s *service) facts(ctx context.Context) (facts string, err error) {
	err = s.pool.QueryRow(ctx, `SELECT format('PostgreSQL %s, fsync %s, %s connections in the pool',
		current_setting('server_version'), current_setting('fsync'), $1::int)`, maxConns).Scan(&facts)
	return facts, err
}

// benchCase is a service to measure, and the check to make after it.
type benchCase struct {
	name   string
	keys   int
	limit  ratelimit.TokenBucket // none without a Rate
	escrow bool                  // does the store take ahead?
	orders bool                  // does a request insert an order?
	inTx   bool                  // is the token taken in the order's transaction?
}

const manyKeys = 10_000

func (s *service) cases() []benchCase {
	// So much that none is refused, and so slow that nothing to speak of is refilled.
	plenty := ratelimit.TokenBucket{Rate: 2, Period: time.Hour, Capacity: 1e6}
	each := ratelimit.TokenBucket{Rate: 1, Period: 500 * time.Hour, Capacity: 1000}
	scarce := ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 500}
	sharded := plenty
	sharded.Shards = 16
	return []benchCase{
		{name: "nothing done, no limit", keys: 1},
		{name: "nothing done, one key", keys: 1, limit: plenty},
		{name: "the same, escrow", keys: 1, limit: plenty, escrow: true},
		{name: "nothing done, 10,000 keys", keys: manyKeys, limit: each},
		{name: "the same, escrow", keys: manyKeys, limit: each, escrow: true},
		{name: "nothing done, 10 a second for all", keys: 1, limit: scarce},
		{name: "the same, escrow", keys: 1, limit: scarce, escrow: true},
		{name: "an order, no limit", keys: 1, orders: true},
		{name: "an order, limit before it, one key", keys: 1, limit: plenty, orders: true},
		{name: "the same, escrow", keys: 1, limit: plenty, orders: true, escrow: true},
		{name: "an order, limit before it, 10,000 keys", keys: manyKeys, limit: each, orders: true},
		{name: "an order, limit in its transaction, one key", keys: 1, limit: plenty, orders: true, inTx: true},
		{name: "an order, limit in its transaction, 16 shards", keys: 1, limit: sharded, orders: true, inTx: true},
		{name: "an order, limit in its transaction, 10,000 keys", keys: manyKeys, limit: each, orders: true, inTx: true},
		{name: "an order, limit in its transaction, 10 a second for all", keys: 1, limit: scarce, orders: true, inTx: true},
	}
}

// round runs a case once, with rows and a limit of its own, and checks the rows afterwards.
func (s *service) round(ctx context.Context, o options, c benchCase) (load, error) {
	if _, err := s.pool.Exec(ctx, "TRUNCATE orders, rate_limits"); err != nil {
		return load{}, err
	}
	s.limitsMade++
	c.limit.Name = fmt.Sprintf("limit_%d", s.limitsMade)
	h, err := s.handler(c)
	if err != nil {
		return load{}, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return load{}, err
	}
	server := &http.Server{Handler: h}
	defer server.Close()
	go server.Serve(listener)

	o.attack, o.keys = "http://"+listener.Addr().String(), c.keys
	begun := time.Now()
	l, err := secondProcess(ctx, o)
	if err != nil {
		return l, err
	}
	return l, s.check(ctx, c, l, time.Since(begun))
}

// check holds a round's figures against the promises.
func (s *service) check(ctx context.Context, c benchCase, l load, lasted time.Duration) error {
	granted := l.Statuses["201"]
	if granted == 0 || granted+l.Statuses["429"] != l.total() {
		return fmt.Errorf("got answers %v, want 201 and 429", l.Statuses)
	}
	var orders int
	var taken float64
	err := s.pool.QueryRow(ctx, "SELECT (SELECT count(*) FROM orders), coalesce(sum($2::float8 - value), 0) FROM rate_limits WHERE name = $1",
		c.limit.Name, c.limit.Definition().Capacity/float64(c.limit.Definition().Shards)).Scan(&orders, &taken)
	if err != nil {
		return err
	}
	s.checks++
	switch d := c.limit.Definition(); {
	case c.orders && orders != granted:
		return fmt.Errorf("%d orders for %d answers that there is one", orders, granted)
	case c.limit.Rate == 0:
	case float64(granted) > d.Capacity*float64(c.keys)+d.Rate*float64(c.keys)*lasted.Seconds()/d.Period.Seconds():
		return fmt.Errorf("granted %d in %v, more than %v has", granted, lasted, d)
	case d.Period >= time.Hour && (taken < float64(granted)-0.5 || !c.escrow && taken > float64(granted)+0.5): // prefetched tokens may be unused
		return fmt.Errorf("%g tokens are taken for %d orders", taken, granted)
	}
	return nil
}

// handler returns the service of a case.
func (s *service) handler(c benchCase) (http.Handler, error) {
	created := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) })
	next := http.Handler(created)
	if c.orders {
		next = s.order()
	}
	if c.limit.Rate == 0 {
		return next, nil
	}
	store := s.store
	if c.escrow {
		store = s.escrow
	}
	m, err := httplimit.New(store, &httplimit.Config{
		Policies: []httplimit.Policy{{Limit: c.limit, Key: httplimit.ByHeader("X-User")}},
		Timeout:  10 * time.Second,
	})
	if err != nil {
		return nil, err
	}
	if c.inTx {
		return s.orderInTx(m), nil
	}
	return m.Handler(next), nil
}

const insert = "INSERT INTO orders (customer) VALUES ($1)"

// order inserts an order in a transaction of its own.
func (s *service) order() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := pgx.BeginFunc(r.Context(), s.pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(r.Context(), insert, r.Header.Get("X-User"))
			return err
		})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusCreated)
	})
}

// orderInTx inserts an order and takes the token in the same transaction. The token
// comes last: its row is locked from then on.
func (s *service) orderInTx(m *httplimit.Middleware) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var result ratelimit.Result
		requests, err := m.Requests(r)
		if err == nil {
			err = pgx.BeginFunc(r.Context(), s.pool, func(tx pgx.Tx) (err error) {
				if _, err = tx.Exec(r.Context(), insert, r.Header.Get("X-User")); err != nil {
					return err
				}
				if result, err = s.store.AllowTx(r.Context(), tx, requests...); err != nil {
					return err
				}
				return result.Err()
			})
		}
		switch {
		case m.Answer(w, r, err):
		case err != nil:
			http.Error(w, err.Error(), http.StatusInternalServerError)
		default:
			m.Granted(w, r, result)
			w.WriteHeader(http.StatusCreated)
		}
	})
}

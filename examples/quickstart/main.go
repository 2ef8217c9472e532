// Quickstart shows the promises of the library, with numbers that it checks:
//
//	go run ./examples/quickstart
//
// A shop lets each customer place 20 orders a second. Many goroutines place
// orders for one customer, each order and its token in one transaction. Were
// there too many? Is there an order for each token? What does a failure cost?
//
// It works in a schema of its own, on the server that DATABASE_URL names or
// else on one that it starts, and leaves nothing behind.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/examples/internal/demo"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// PlaceOrder lets each customer place 20 orders a second, and 50 at once.
var PlaceOrder = ratelimit.TokenBucket{Name: "place_order", Rate: 20, Period: time.Second, Capacity: 50}

const goroutines, rushTime = 32, 3 * time.Second

func main() { demo.Main("quickstart", run) }

func run(ctx context.Context, out io.Writer) (err error) {
	fmt.Fprintln(out, "1. A database")
	db, err := demo.Database(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	fmt.Fprintf(out, "   server: %s\n   schema: %s, migrated with goose, dropped at the end\n", db.Source, db.Schema)
	if _, err := db.Pool.Exec(ctx, "CREATE TABLE orders (customer text, pieces int)"); err != nil {
		return fmt.Errorf("create table orders: %w", err)
	}
	store, err := pgstore.New(db.Pool, nil)
	if err != nil {
		return err
	}
	s := shop{db.Pool, store, out}
	for _, step := range []func(context.Context) error{s.rush, s.failure, s.row} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	fmt.Fprintln(out, "\nNext: docs/limits.md, and go run ./examples/login, scheduler, river.")
	return nil
}

type shop struct {
	pool  *pgxpool.Pool
	store *pgstore.Store
	out   io.Writer
}

// order takes a token and inserts an order, in one SERIALIZABLE transaction: both
// happen, or neither. When PostgreSQL finds transactions in each other's way
// (error 40001), AllowFunc runs all of it again.
func (s shop) order(ctx context.Context, customer string) (ratelimit.Result, error) {
	return s.store.AllowFunc(ctx, []ratelimit.Request{PlaceOrder.For(customer)}, func(tx pgx.Tx, _ ratelimit.Result) error {
		_, err := tx.Exec(ctx, "INSERT INTO orders VALUES ($1, 1)", customer)
		return err
	})
}

// rush has many goroutines order for alice, and counts the outcomes.
func (s shop) rush(ctx context.Context) error {
	fmt.Fprintf(s.out, "\n2. %d goroutines place orders for alice for %v, each as often as it can\n", goroutines, rushTime)
	fmt.Fprintf(s.out, "   limit: %g tokens a second are refilled, up to %g; an order takes one\n"+
		"   each order: BEGIN ISOLATION LEVEL SERIALIZABLE, take the token, INSERT, COMMIT\n", PlaceOrder.Rate, PlaceOrder.Capacity)
	var start time.Time
	var seconds float64
	var orders int
	if err := s.pool.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&start); err != nil {
		return err
	}
	granted, refused, err := s.placeOrders(ctx)
	if err != nil {
		return err
	}
	if err := s.pool.QueryRow(ctx, "SELECT extract(epoch FROM clock_timestamp() - $1)::float8, count(*) FROM orders", start).Scan(&seconds, &orders); err != nil {
		return err
	}
	most := PlaceOrder.Capacity + PlaceOrder.Rate*seconds // as its Period is a second
	fmt.Fprintf(s.out, "   granted %d orders, refused %d\n", granted, refused)
	return errors.Join(
		demo.Claim(s.out, float64(granted) <= most, "never over: %d granted; the limit in this time: %g + %g/s · %.3f s = %.2f (database clock)",
			granted, PlaceOrder.Capacity, PlaceOrder.Rate, seconds, most),
		demo.Claim(s.out, orders == granted, "spent with the work: %d tokens spent, %d orders in the table", granted, orders))
}

// placeOrders is the rush itself.
func (s shop) placeOrders(ctx context.Context) (granted, refused int, err error) {
	open, closeShop := context.WithTimeout(ctx, rushTime)
	defer closeShop()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for open.Err() == nil {
				// Not with open: customers in the shop when it closes are served.
				result, orderErr := s.order(ctx, "alice")
				mu.Lock()
				switch {
				case orderErr == nil:
					granted++
				case errors.Is(orderErr, ratelimit.ErrRefused):
					refused++
				default: // the database failed, or Ctrl-C
					err = orderErr
					closeShop()
				}
				mu.Unlock()
				select { // until the refusal's promise; 0 when granted
				case <-time.After(result.RetryAfter):
				case <-open.Done():
				}
			}
		})
	}
	wg.Wait()
	return granted, refused, err
}

// failure orders for bob and fails late, in a transaction that it makes itself.
func (s shop) failure(ctx context.Context) error {
	fmt.Fprintln(s.out, "\n3. bob orders 40 pieces at 1 token each, and then his payment fails")
	var inside ratelimit.Result
	errPayment := errors.New("the payment failed")
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) (err error) {
		if err := s.store.TakeTx(ctx, tx, PlaceOrder.ForN("bob", 40)); err != nil {
			return err // a refusal too
		}
		if inside, err = s.store.CheckTx(ctx, tx, PlaceOrder.ForN("bob", 0)); err != nil {
			return err
		}
		if _, err = tx.Exec(ctx, "INSERT INTO orders VALUES ('bob', 40)"); err != nil {
			return err
		}
		return errPayment
	})
	if !errors.Is(err, errPayment) {
		return fmt.Errorf("bob's order should fail by his payment, but: %w", err)
	}
	fmt.Fprintf(s.out, "   in the transaction: %d of %g tokens left, %v to fill up again\n", inside.Remaining, inside.Capacity, inside.ResetAfter.Round(time.Millisecond))
	after, err := s.store.Check(ctx, PlaceOrder.For("bob"))
	if err != nil {
		return err
	}
	var orders int
	if err := s.pool.QueryRow(ctx, "SELECT count(*) FROM orders WHERE customer = 'bob'").Scan(&orders); err != nil {
		return err
	}
	return demo.Claim(s.out, after.Value == after.Capacity && orders == 0, "never lost: rolled back, and %v later bob has %d of %g tokens, and %d orders",
		after.At.Sub(inside.At), after.Remaining, after.Capacity, orders)
}

// row shows the row of a limit.
func (s shop) row(ctx context.Context) error {
	fmt.Fprintln(s.out, "\n4. All that is stored: SELECT name, key, shard, value, ts FROM rate_limits")
	var name, key, shard, value, ts, rows string
	const sql = "SELECT name, key, shard::text, value::text, ts::text, count(*) OVER ()::text FROM rate_limits"
	if err := s.pool.QueryRow(ctx, sql).Scan(&name, &key, &shard, &value, &ts, &rows); err != nil {
		return err
	}
	fmt.Fprintf(s.out, "   name        | key   | shard | value                | ts\n"+
		"  -------------+-------+-------+----------------------+------------------------------\n"+
		"   %-11s | %-5s | %5s | %20s | %s\n"+
		"   It says: value tokens at the instant ts. The next call adds what was refilled since.\n", name, key, shard, value, ts)
	return demo.Claim(s.out, rows == "1" && key == "alice", "nothing else to store: %s row, for bob's went with his transaction", rows)
}

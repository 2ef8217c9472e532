// Signup limits how many accounts can be made, by address and in all, and shows
// why that belongs into the transaction that makes the account:
//
//	go run ./examples/signup
//
// Two limits are taken together, all or nothing: 3 accounts an hour for each
// address, 100 an hour for the service. They are spent if and only if there is
// an account: an e-mail address that is taken already, a constraint that fails
// and a connection that breaks cost nobody anything. Counters elsewhere have to
// be given back then, by code that may not get to run.
//
// Then it checks that this is so: a crowd signs up at once, with duplicates.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/examples/internal/demo"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var (
	SignUpsByAddress = ratelimit.TokenBucket{Name: "sign_up_address", Rate: 3, Period: time.Hour}
	SignUps          = ratelimit.TokenBucket{Name: "sign_up", Rate: 100, Period: time.Hour}
)

// errTaken is an e-mail address that has an account.
var errTaken = errors.New("this e-mail address has an account")

type service struct {
	pool  *pgxpool.Pool
	store *pgstore.Store
	out   io.Writer
}

// signUp makes an account. When it refuses, the error is a
// *ratelimit.RefusedError, which says when to try again: an HTTP server
// answers 429 with Retry-After.
func (s service) signUp(ctx context.Context, address, email string) error {
	requests := []ratelimit.Request{SignUpsByAddress.For(address), SignUps.For("")}
	_, err := s.store.AllowFunc(ctx, requests, func(tx pgx.Tx, _ ratelimit.Result) error {
		_, err := tx.Exec(ctx, `INSERT INTO users (email, address) VALUES ($1, $2)`, email, address)
		return err // rolls back, and the tokens with it
	})
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "23505" { // unique_violation
		return errTaken
	}
	return err
}

func main() { demo.Main("signup", run) }

func run(ctx context.Context, out io.Writer) (err error) {
	db, err := demo.Database(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if _, err := db.Pool.Exec(ctx, `CREATE TABLE users (email text PRIMARY KEY, address text NOT NULL)`); err != nil {
		return err
	}
	store, err := pgstore.New(db.Pool, nil)
	if err != nil {
		return err
	}
	s := service{db.Pool, store, out}
	if err := s.duplicates(ctx); err != nil {
		return err
	}
	return s.crowd(ctx)
}

// duplicates shows the cost of a failed sign-up.
func (s service) duplicates(ctx context.Context) error {
	fmt.Fprintln(s.out, "1. ann signs up, and ten times again with the same e-mail address")
	if err := s.signUp(ctx, "198.51.100.1", "ann@example.com"); err != nil {
		return err
	}
	for range 10 {
		if err := s.signUp(ctx, "198.51.100.1", "ann@example.com"); !errors.Is(err, errTaken) {
			return fmt.Errorf("a duplicate: %w", err)
		}
	}
	left, err := s.store.Check(ctx, SignUpsByAddress.For("198.51.100.1"))
	if err != nil {
		return err
	}
	return demo.Claim(s.out, left.Remaining == 2, "one account costs one sign-up, the failures none: %d of %g left", left.Remaining, left.Capacity)
}

const (
	addresses = 20
	attempts  = 8 // from each address, of which every other is a duplicate of the one before
)

// crowd has everybody sign up at once, and counts the outcomes.
func (s service) crowd(ctx context.Context) error {
	fmt.Fprintf(s.out, "\n2. %d sign-ups at once, from %d addresses, half of them duplicates\n", addresses*attempts, addresses)
	made, taken, refused, err := s.signUpAll(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(s.out, "   %d accounts made, %d e-mail addresses taken, %d refused\n", made, taken, refused)
	var users, most int
	err = s.pool.QueryRow(ctx, `SELECT count(*), (SELECT max(count) FROM (SELECT count(*) FROM users GROUP BY address)  _) FROM users`).Scan(&users, &most)
	if err != nil {
		return err
	}
	left, err := s.store.Check(ctx, SignUps.For(""))
	if err != nil {
		return err
	}
	// The refill since the start is far less than half a token.
	spent := int(math.Round(left.Capacity - left.Value))
	return errors.Join(
		demo.Claim(s.out, most <= 3, "never over: no address has more than %d accounts", most),
		demo.Claim(s.out, users == 1+addresses*3, "nor under: %d accounts, 3 for each of the crowd's addresses and ann's", users),
		demo.Claim(s.out, spent == users, "spent with the work: %d accounts, %d of the service's sign-ups spent", users, spent))
}

func (s service) signUpAll(ctx context.Context) (made, taken, refused int, err error) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range addresses * attempts {
		address, pair := i%addresses, i/addresses/2
		wg.Go(func() {
			email := fmt.Sprintf("user%d-%d@example.com", address, pair)
			signUpErr := s.signUp(ctx, fmt.Sprintf("203.0.113.%d", address), email)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case signUpErr == nil:
				made++
			case errors.Is(signUpErr, errTaken):
				taken++
			case errors.Is(signUpErr, ratelimit.ErrRefused):
				refused++
			default:
				err = signUpErr
			}
		})
	}
	wg.Wait()
	return made, taken, refused, err
}

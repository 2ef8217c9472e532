// Login limits failed logins:
//
//	go run ./examples/login
//
// 5 failures for an account, one more every ten minutes; 20 for an address. Three
// things are easy to get wrong, and this program gets them right:
//
//   - Failures are counted on their own, not in the transaction of the login:
//     that one rolls back when the login fails, and would take the count along.
//     And before that transaction begins: callers that hold one connection and
//     wait for another can bring the whole pool to a standstill.
//   - An attempt is counted before the password is looked at, and given back if
//     it was right. Looking at the limit first and counting the failure after
//     lets a thousand guesses through that are made at the same time: all of
//     them look before any of them counts.
//   - While an account is locked the right password is refused too. Otherwise
//     guessing could go on, with the answer in plain sight.
//
// A success forgets the account's failures, in the transaction that makes the
// session.
package main

import (
	"context"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha512"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/examples/internal/demo"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var (
	FailuresByAccount = ratelimit.TokenBucket{Name: "login_account", Rate: 1, Period: 10 * time.Minute, Capacity: 5}
	FailuresByAddress = ratelimit.TokenBucket{Name: "login_address", Rate: 20, Period: time.Hour}
)

// errWrong is a wrong password, or an account that there is not.
var errWrong = errors.New("wrong name or password")

type service struct {
	pool    *pgxpool.Pool
	store   *pgstore.Store
	out     io.Writer
	checked *atomic.Int64 // passwords that were looked at
}

// logIn makes a session, or fails with errWrong or a *ratelimit.RefusedError,
// which says when to try again.
func (s service) logIn(ctx context.Context, address, account, password string) error {
	// This is one failure, unless the password turns out to be right.
	failure, err := s.store.Allow(ctx, FailuresByAccount.For(account), FailuresByAddress.For(address))
	if err == nil {
		err = failure.Err()
	}
	if err != nil {
		return err // the limiter does not answer: nobody gets in
	}
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if err := s.verify(ctx, tx, account, password); err != nil {
			return err // rolls back
		}
		if _, err := tx.Exec(ctx, `INSERT INTO sessions (account) VALUES ($1)`, account); err != nil {
			return err
		}
		// If there is no session, there was no success.
		if _, err := s.store.CancelTx(ctx, tx, failure.Receipt); err != nil {
			return err
		}
		return s.store.ResetTx(ctx, tx, FailuresByAccount, account)
	})
}

// verify takes as long for an account that there is not.
func (s service) verify(ctx context.Context, tx pgx.Tx, account, password string) error {
	salt, want := make([]byte, 16), make([]byte, sha512.Size)
	err := tx.QueryRow(ctx, `SELECT salt, hash FROM accounts WHERE name = $1`, account).Scan(&salt, &want)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return err
	}
	s.checked.Add(1)
	got, err := hash(password, salt)
	if err != nil {
		return err
	}
	if subtle.ConstantTimeCompare(got, want) != 1 {
		return errWrong
	}
	return nil
}

// hash is PBKDF2 as OWASP recommends it. (Argon2id is better, and not in the
// standard library.)
func hash(password string, salt []byte) ([]byte, error) {
	return pbkdf2.Key(sha512.New, password, salt, 210_000, sha512.Size)
}

func main() { demo.Main("login", run) }

const password = "correct horse battery staple"

func run(ctx context.Context, out io.Writer) (err error) {
	db, err := demo.Database(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	store, err := pgstore.New(db.Pool, nil)
	if err != nil {
		return err
	}
	s := service{db.Pool, store, out, new(atomic.Int64)}
	if err := s.setUp(ctx); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{s.rollBack, s.success, s.guessing} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (s service) setUp(ctx context.Context) error {
	_, err := s.pool.Exec(ctx, `
		CREATE TABLE accounts (name text PRIMARY KEY, salt bytea NOT NULL, hash bytea NOT NULL);
		CREATE TABLE sessions (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), account text NOT NULL)`)
	if err != nil {
		return err
	}
	for _, name := range []string{"ann", "bob"} {
		salt := make([]byte, 16)
		rand.Read(salt) // never fails
		key, err := hash(password, salt)
		if err != nil {
			return err
		}
		if _, err := s.pool.Exec(ctx, `INSERT INTO accounts VALUES ($1, $2, $3)`, name, salt, key); err != nil {
			return err
		}
	}
	return nil
}

// left returns how many failures an account has left.
func (s service) left(ctx context.Context, account string) (int64, error) {
	result, err := s.store.Check(ctx, FailuresByAccount.For(account))
	return result.Remaining, err
}

func (s service) rollBack(ctx context.Context) error {
	fmt.Fprintln(s.out, "1. ann mistypes her password twice; each time the transaction rolls back")
	for range 2 {
		if err := s.logIn(ctx, "198.51.100.1", "ann", "corect horse"); !errors.Is(err, errWrong) {
			return fmt.Errorf("a wrong password: %w", err)
		}
	}
	left, err := s.left(ctx, "ann")
	if err != nil {
		return err
	}
	return demo.Claim(s.out, left == 3, "the failures are counted all the same: %d of 5 left", left)
}

func (s service) success(ctx context.Context) error {
	fmt.Fprintln(s.out, "\n2. she gets it right")
	if err := s.logIn(ctx, "198.51.100.1", "ann", password); err != nil {
		return err
	}
	left, err := s.left(ctx, "ann")
	if err != nil {
		return err
	}
	var sessions int
	if err := s.pool.QueryRow(ctx, `SELECT count(*) FROM sessions`).Scan(&sessions); err != nil {
		return err
	}
	return demo.Claim(s.out, left == 5 && sessions == 1, "%d session, and her failures are forgotten: %d of 5 left", sessions, left)
}

const guesses = 100

// guessing attacks bob's account with many guesses at once.
func (s service) guessing(ctx context.Context) error {
	fmt.Fprintf(s.out, "\n3. %d guesses at bob's password, all at the same time, from as many addresses\n", guesses)
	s.checked.Store(0)
	wrong, refused, err := s.guessAll(ctx)
	if err != nil {
		return err
	}
	checked := s.checked.Load()
	if err := demo.Claim(s.out, checked == 5 && wrong == 5 && refused == guesses-5,
		"%d passwords were looked at, %d guesses refused", checked, refused); err != nil {
		return err
	}
	err = s.logIn(ctx, "198.51.100.2", "bob", password)
	var locked *ratelimit.RefusedError
	if !errors.As(err, &locked) {
		return fmt.Errorf("a promise does not hold: bob's account is not locked: %w", err)
	}
	return demo.Claim(s.out, s.checked.Load() == checked, "the right password is refused too, and not looked at: try again in %v",
		locked.Result.RetryAfter.Round(time.Second))
}

func (s service) guessAll(ctx context.Context) (wrong, refused int, err error) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range guesses {
		wg.Go(func() {
			guessErr := s.logIn(ctx, fmt.Sprintf("203.0.113.%d", i), "bob", fmt.Sprintf("guess %d", i))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case errors.Is(guessErr, errWrong):
				wrong++
			case errors.Is(guessErr, ratelimit.ErrRefused):
				refused++
			default:
				err = fmt.Errorf("guess %d: %w", i, guessErr)
			}
		})
	}
	wg.Wait()
	return wrong, refused, err
}

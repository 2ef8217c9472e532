// Api is an HTTP service with limits, to run and to curl:
//
//	go run ./examples/api -serve 127.0.0.1:8080   # then see below
//	go run ./examples/api                         # checks what it promises, and ends
//
// It has four routes, each with another way of counting:
//
//	curl -i -H 'X-Api-Key: ann' localhost:8080/hello           # 3 at once, then one every 2 s
//	curl -i -H 'X-Api-Key: ann' localhost:8080/rows?rows=800   # costs as many as it asks for
//	curl -i -H 'X-Api-Key: ann' -d '' localhost:8080/orders    # token and order in one transaction
//	curl -i -u ann:guess localhost:8080/login                  # only failures count
//
// The first three are behind authentication, which knows the keys ann, bob, eve and zoe, and
// limit the customer that it found: a client that could choose its limit would
// have as many limits as it likes.
package main

import (
	"context"
	"crypto/subtle"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/examples/internal/demo"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var (
	Hello        = ratelimit.TokenBucket{Name: "hello", Rate: 1, Period: 2 * time.Second, Capacity: 3}
	Daily        = ratelimit.FixedWindow{Name: "daily", Rate: 10_000, Period: 24 * time.Hour}
	Rows         = ratelimit.TokenBucket{Name: "rows", Rate: 1000, Period: time.Minute}
	PlaceOrder   = ratelimit.TokenBucket{Name: "place_order", Rate: 5, Period: time.Minute}
	FailedLogins = ratelimit.TokenBucket{Name: "failed_logins", Rate: 1, Period: 10 * time.Minute, Capacity: 3}
)

// customers are those that have API keys.
var customers = map[string]string{"ann": "Ann & Sons", "bob": "Bob's", "eve": "Eve Ltd", "zoe": "Zoe Inc."}

type customerKey struct{}

// authenticated has next serve requests with a valid API key, and answers others 401.
func authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		customer, ok := customers[r.Header.Get("X-Api-Key")]
		if !ok {
			http.Error(w, "no such API key", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), customerKey{}, customer)))
	})
}

// customerOf returns the customer that authentication has found.
func customerOf(r *http.Request) string {
	customer, _ := r.Context().Value(customerKey{}).(string)
	return customer
}

func main() {
	serve := flag.String("serve", "", "serve on this `address` until Ctrl-C")
	flag.Parse()
	if *serve == "" {
		demo.Main("api", run)
		return
	}
	demo.Main("api", func(ctx context.Context, out io.Writer) error {
		return with(ctx, *serve, func(url string) error {
			fmt.Fprintf(out, "serving on %s\n", url)
			<-ctx.Done()
			return nil
		})
	})
}

// with runs do while the service listens on an address.
func with(ctx context.Context, address string, do func(url string) error) (err error) {
	db, err := demo.Database(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if _, err := db.Pool.Exec(ctx, "CREATE TABLE orders (customer text NOT NULL)"); err != nil {
		return err
	}
	store, err := pgstore.New(db.Pool, nil)
	if err != nil {
		return err
	}
	h, err := routes(db.Pool, store)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second}
	go server.Serve(listener) // until Shutdown
	defer func() {
		shutdown, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, server.Shutdown(shutdown))
	}()
	return do("http://" + listener.Addr().String())
}

// routes returns the service: each route behind its limits.
func routes(pool *pgxpool.Pool, store *pgstore.Store) (http.Handler, error) {
	customer := httplimit.Hashed(httplimit.BySubject(customerOf)) // hashed: no name in the database
	addresses, err := httplimit.NewAddresses(nil)                 // no proxy: believe no header
	if err != nil {
		return nil, err
	}
	account := func(r *http.Request) string { name, _, _ := r.BasicAuth(); return name }
	configs := map[string]*httplimit.Config{
		// Two policies: a short one and a long one, all or nothing.
		"hello": {Policies: []httplimit.Policy{{Limit: Hello, Key: customer}, {Limit: Daily, Key: customer}}},
		// A request without a number of rows gets 100, so it costs 100.
		"rows":  {Policies: []httplimit.Policy{{Limit: Rows, Key: customer, Cost: httplimit.CostFromQuery("rows", 1, 100)}}},
		"order": {Policies: []httplimit.Policy{{Limit: PlaceOrder, Key: customer}}, Jitter: 0.1},
		// One limit for account and address together: nobody can lock another's account.
		"login": {
			Policies: []httplimit.Policy{{
				Limit:  FailedLogins,
				Key:    httplimit.Join(httplimit.BySubject(account), addresses.Key),
				Counts: httplimit.CountOnly(http.StatusUnauthorized),
			}},
			Fields: httplimit.NoFields,
		},
	}
	limits := map[string]*httplimit.Middleware{}
	for name, config := range configs {
		if limits[name], err = httplimit.New(store, config); err != nil {
			return nil, err
		}
	}
	mux := http.NewServeMux()
	mux.Handle("GET /hello", authenticated(limits["hello"].Handler(http.HandlerFunc(hello))))
	mux.Handle("GET /rows", authenticated(limits["rows"].Handler(http.HandlerFunc(rows))))
	mux.Handle("GET /login", limits["login"].Handler(http.HandlerFunc(logIn)))
	mux.Handle("POST /orders", authenticated(orders{pool, store, limits["order"]}))
	return mux, nil
}

func hello(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "hello") }

func rows(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.Atoi(r.URL.Query().Get("rows"))
	if err != nil {
		n = 100
	}
	fmt.Fprintf(w, "%d rows\n", n)
}

func logIn(w http.ResponseWriter, r *http.Request) {
	_, password, _ := r.BasicAuth()
	if subtle.ConstantTimeCompare([]byte(password), []byte("correct horse battery staple")) != 1 {
		http.Error(w, "wrong name or password", http.StatusUnauthorized)
		return
	}
	fmt.Fprintln(w, "welcome")
}

// orders takes the token in the transaction that inserts the order: a request that
// fails costs nothing.
type orders struct {
	pool  *pgxpool.Pool
	store *pgstore.Store
	limit *httplimit.Middleware
}

func (o orders) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var result ratelimit.Result
	requests, err := o.limit.Requests(r)
	if err == nil {
		err = pgx.BeginFunc(r.Context(), o.pool, func(tx pgx.Tx) (err error) {
			if _, err = tx.Exec(r.Context(), "INSERT INTO orders VALUES ($1)", customerOf(r)); err != nil {
				return err
			}
			if result, err = o.store.AllowTx(r.Context(), tx, requests...); err != nil {
				return err
			}
			return result.Err() // a refusal rolls the order back
		})
	}
	switch {
	case o.limit.Answer(w, r, err): // 429, 422 or 400
	case err != nil:
		http.Error(w, "the order could not be placed", http.StatusInternalServerError)
	default:
		o.limit.Granted(w, r, result)
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintln(w, "ordered")
	}
}

// run checks the promises of the service.
func run(ctx context.Context, out io.Writer) error {
	return with(ctx, "127.0.0.1:0", func(url string) error {
		c := caller{url: url, client: http.DefaultClient}
		for _, step := range []func(context.Context, io.Writer, caller) error{waits, costs, ordersInTx, guesses, client} {
			if err := step(ctx, out, c); err != nil {
				return err
			}
		}
		return nil
	})
}

// caller calls the service.
type caller struct {
	url    string
	client *http.Client
}

// call sends a request with an API key, and returns the response with its body read.
func (c caller) call(ctx context.Context, method, path, key string) (resp *http.Response, body string, err error) {
	r, err := http.NewRequestWithContext(ctx, method, c.url+path, nil)
	if err != nil {
		return nil, "", err
	}
	r.Header.Set("X-Api-Key", key)
	if user, password, ok := strings.Cut(key, "/"); ok {
		r.SetBasicAuth(user, password)
	}
	if resp, err = c.client.Do(r); err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp, string(text), err
}

// statuses returns those of several calls, one after the other.
func (c caller) statuses(ctx context.Context, n int, method, path, key string) (statuses []int, last *http.Response, err error) {
	for range n {
		if last, _, err = c.call(ctx, method, path, key); err != nil {
			return nil, nil, err
		}
		statuses = append(statuses, last.StatusCode)
	}
	return statuses, last, nil
}

func waits(ctx context.Context, out io.Writer, c caller) error {
	fmt.Fprintln(out, "1. ann says hello four times, and waits as long as she is told")
	got, last, err := c.statuses(ctx, 4, "GET", "/hello", "ann")
	if err != nil {
		return err
	}
	wait, err := strconv.Atoi(last.Header.Get("Retry-After"))
	if err != nil {
		return err
	}
	if err := demo.Claim(out, fmt.Sprint(got) == "[200 200 200 429]", "she gets %v, and Retry-After: %d", got, wait); err != nil {
		return err
	}
	select {
	case <-time.After(time.Duration(wait) * time.Second):
	case <-ctx.Done():
		return ctx.Err()
	}
	got, _, err = c.statuses(ctx, 1, "GET", "/hello", "ann")
	if err != nil {
		return err
	}
	stranger, _, err := c.statuses(ctx, 1, "GET", "/hello", "made up")
	if err != nil {
		return err
	}
	if err := demo.Claim(out, fmt.Sprint(stranger) == "[401]", "somebody with a key that he made up gets %v", stranger); err != nil {
		return err
	}
	return demo.Claim(out, fmt.Sprint(got) == "[200]", "%d s later she gets %v", wait, got)
}

func costs(ctx context.Context, out io.Writer, c caller) error {
	fmt.Fprintln(out, "\n2. bob asks for rows: 900 of 1,000, then 200, then 5,000, then -1")
	var got []int
	for _, n := range []string{"900", "200", "5000", "-1"} {
		statuses, _, err := c.statuses(ctx, 1, "GET", "/rows?rows="+n, "bob")
		if err != nil {
			return err
		}
		got = append(got, statuses...)
	}
	return demo.Claim(out, fmt.Sprint(got) == "[200 429 422 400]", "he gets %v: later, never, and nonsense", got)
}

func ordersInTx(ctx context.Context, out io.Writer, c caller) error {
	fmt.Fprintln(out, "\n3. eve places seven orders, each in one transaction with its token")
	got, last, err := c.statuses(ctx, 7, "POST", "/orders", "eve")
	if err != nil {
		return err
	}
	return demo.Claim(out, fmt.Sprint(got) == "[201 201 201 201 201 429 429]" && last.Header.Get("Retry-After") != "",
		"she gets %v: five orders, five tokens", got)
}

func guesses(ctx context.Context, out io.Writer, c caller) error {
	fmt.Fprintln(out, "\n4. mallory logs in five times as ann, who logs in with the right password in between")
	var got []int
	for _, password := range []string{"a", "correct horse battery staple", "b", "c", "correct horse battery staple"} {
		statuses, last, err := c.statuses(ctx, 1, "GET", "/login", "ann/"+password)
		if err != nil {
			return err
		}
		if last.Header.Get("RateLimit") != "" {
			return errors.New("a login tells how many guesses are left")
		}
		got = append(got, statuses...)
	}
	return demo.Claim(out, fmt.Sprint(got) == "[401 200 401 401 429]", "the answers are %v: only failures count", got)
}

func client(ctx context.Context, out io.Writer, c caller) error {
	fmt.Fprintln(out, "\n5. zoe says hello five times, through the client that waits by itself")
	transport, err := httplimit.NewTransport(nil)
	if err != nil {
		return err
	}
	c.client = &http.Client{Transport: transport}
	begun := time.Now()
	got, _, err := c.statuses(ctx, 5, "GET", "/hello", "zoe")
	if err != nil {
		return err
	}
	took := time.Since(begun)
	return demo.Claim(out, fmt.Sprint(got) == "[200 200 200 200 200]" && took > 3*time.Second, "she gets %v, in %v", got, took.Round(time.Second))
}

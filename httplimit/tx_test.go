package httplimit_test

import (
	"context"
	"errors"
	"go/build"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(8) // those that take time wait for instants
	pgtest.Main(m)
}

func newStore(t testing.TB, clock func() time.Time) (*pgstore.Store, *pgtest.DB) {
	t.Helper()
	db := pgtest.New(t)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Clock: clock})
	must(t, err)
	return store, db
}

func TestRetryAfterIsKeptInPostgreSQL(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	clock := newClock()
	store, _ := newStore(t, clock.Now)
	keepRetryAfter(t, store, clock, 1000)
}

// orders is a service that inserts an order and takes a token in one transaction.
type orders struct {
	pool  *pgxpool.Pool
	store *pgstore.Store
	limit *httplimit.Middleware
	table string
}

var errNoSuchPiece = errors.New("no such piece")

func (o orders) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var result ratelimit.Result
	requests, err := o.limit.Requests(r)
	if err == nil {
		err = pgx.BeginFunc(r.Context(), o.pool, func(tx pgx.Tx) (err error) {
			if result, err = o.store.AllowTx(r.Context(), tx, requests...); err == nil {
				err = result.Err()
			}
			if err != nil {
				return err
			}
			_, err = tx.Exec(r.Context(), "INSERT INTO "+o.table+" VALUES ($1)", r.Header.Get("X-User"))
			if err == nil && r.URL.Query().Has("fail") {
				return errNoSuchPiece
			}
			return err
		})
	}
	switch {
	case o.limit.Answer(w, r, err):
	case err != nil:
		http.Error(w, "no order", http.StatusInternalServerError)
	default:
		o.limit.Granted(w, r, result)
		w.WriteHeader(http.StatusCreated)
	}
}

// A handler that takes in its own transaction refuses as the middleware does, and
// what it rolls back costs nothing.
func TestInTheHandlersTransaction(t *testing.T) {
	clock := newClock()
	store, db := newStore(t, clock.Now)
	table := db.Schema + ".orders"
	must(t, errOf(db.Pool.Exec(t.Context(), "CREATE TABLE "+table+" (customer text)")))
	var decisions []ratelimit.Outcome
	limit := newMiddleware(t, store, httplimit.Config{
		Policies: []httplimit.Policy{{Limit: perMinute, Key: byUser, Cost: httplimit.CostFromQuery("n", 1, 1)}},
		Observe: func(ctx context.Context, e ratelimit.Event) {
			if decisions = append(decisions, e.Outcome); e.Passed != (e.Outcome == ratelimit.OutcomeGranted) || e.Door != "httplimit" || httplimit.RequestOf(ctx) == nil {
				t.Errorf("observed %+v", e)
			}
		},
	})
	h := orders{db.Pool, store, limit, table}
	for _, step := range []struct {
		query  string
		status int
		limits string
		orders int
	}{
		{"", 201, `"per_minute";r=2;t=6`, 1},
		{"?fail", 500, "", 1},
		{"?n=2", 201, `"per_minute";r=0;t=6`, 2},
		{"", 429, `"per_minute";r=0;t=6`, 2},
		{"?n=4", 422, "", 2},
		{"?n=-4", 400, "", 2},
	} {
		resp := serve(h, get("/"+step.query, "X-User", "ann"))
		wantStatus(t, resp, step.status)
		wantHeader(t, resp, "RateLimit", step.limits)
		if got := len(resp.Header.Values("RateLimit")); got > 1 {
			t.Errorf("%q: got %d RateLimit fields", step.query, got)
		}
		if step.status == 429 {
			wantHeader(t, resp, "Retry-After", "6")
			wantViolated(t, resp, "per_minute")
		}
		var got int
		if err := db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&got); err != nil || got != step.orders {
			t.Errorf("%q: got %d orders, %v, want %d", step.query, got, err, step.orders)
		}
	}
	// What was rolled back is not told, as it is not spent.
	if want := []ratelimit.Outcome{
		ratelimit.OutcomeGranted, ratelimit.OutcomeGranted, ratelimit.OutcomeRefused, ratelimit.OutcomeTooLarge, ratelimit.OutcomeInvalid,
	}; !slices.Equal(decisions, want) {
		t.Errorf("observed %v, want %v", decisions, want)
	}
	if limit.Answer(nil, nil, nil) || limit.Answer(nil, get("/"), errDatabase) {
		t.Error("Answer answered what is not about limits")
	}
}

func TestImports(t *testing.T) {
	pkg, err := build.ImportDir(".", 0)
	must(t, err)
	for _, imported := range pkg.Imports {
		switch first, _, _ := strings.Cut(imported, "/"); {
		case !strings.Contains(first, "."):
		case imported == "github.com/dunglas/httpsfv", imported == "github.com/pgratelimit/ratelimit":
		case imported == "github.com/pgratelimit/ratelimit/internal/edge":
		default:
			t.Errorf("the package imports %s", imported)
		}
	}
}

// Package preamble is what pages take for granted: code of their reader's program, in stubs
// that compile and run. It is copied in front of the code of each page. A page that
// declares one of these names itself goes without it.
package preamble

//lint:file-ignore U1000 it is for copying

import (
	"context"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	// Pages use these too, and the module has to know.
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/pressly/goose/v3"
	_ "github.com/riverqueue/river"
	_ "github.com/riverqueue/river/rivertype"
	_ "go.opentelemetry.io/otel"
	_ "golang.org/x/text/unicode/norm"
	_ "golang.org/x/time/rate"
	_ "google.golang.org/grpc"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	_ "github.com/pgratelimit/ratelimit/grpclimit"
	_ "github.com/pgratelimit/ratelimit/httplimit"
	_ "github.com/pgratelimit/ratelimit/otellimit"
	_ "github.com/pgratelimit/ratelimit/riverlimit"
)

var (
	SendMessage = ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: time.Minute, Capacity: 20}
	SignUp      = ratelimit.FixedWindow{Name: "sign_up", Rate: 100, Period: time.Hour}
	CallPartner = ratelimit.TokenBucket{Name: "call_partner", Rate: 5, Period: time.Second, MaxReserved: 600}
	Requests    = ratelimit.TokenBucket{Name: "llm_requests", Rate: 60, Period: time.Minute}
	LLMTokens   = ratelimit.TokenBucket{Name: "llm_tokens", Rate: 40_000, Period: time.Minute}
	Free        = ratelimit.FixedWindow{Name: "calls", Rate: 50, Every: ratelimit.Month}
	Team        = ratelimit.FixedWindow{Name: "calls", Rate: 1000, Every: ratelimit.Month}
)

// limits is a catalog that knows a limit.
var limits = func() *catalog.Catalog {
	c, err := catalog.NewInMemory(nil)
	if err == nil {
		err = c.Publish(context.Background(), ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: time.Minute, Capacity: 20})
	}
	if err != nil {
		panic(err)
	}
	return c
}()

var user, org, address, text, prompt = "alice", "acme", "192.0.2.7", "hello", "Why?"

// userOf returns the user whom authentication has found.
func userOf(r *http.Request) string { return user }

// accountOf returns the account that a request names, to log in.
func accountOf(r *http.Request) string { return user }

func paying(user string) bool { return user == "alice" }

// authenticate lets only requests through whose user is known.
func authenticate(next http.Handler) http.Handler { return next }

func placeOrder(r *http.Request, tx pgx.Tx) error {
	_, err := tx.Exec(r.Context(), "INSERT INTO orders (customer) VALUES ($1)", user)
	return err
}

// What workers do with jobs.

func start(jobs []string) {}

func call(job string) {}

func putOff(until time.Time) error { return nil }

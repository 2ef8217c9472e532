package main

import (
	"context"
	"errors"
	"net/http/httptest"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

func TestRun(t *testing.T) {
	if err := run(); err != nil {
		t.Fatal(err)
	}
}

// broken is a store that does not answer.
type broken struct{}

func (broken) Allow(context.Context, ...ratelimit.Request) (ratelimit.Result, error) {
	return ratelimit.Result{}, errors.New("the database is down")
}

func (broken) Settle(context.Context, *ratelimit.Receipt, ...float64) (ratelimit.Result, error) {
	return ratelimit.Result{}, errors.New("the database is down")
}

// serve starts the service, for a test.
func serve(t *testing.T, store httplimit.Store) *httptest.Server {
	t.Helper()
	h, err := service(store)
	if err != nil {
		t.Fatal(err)
	}
	server := start(h)
	t.Cleanup(server.Close)
	return server
}

// Every answer of the middleware has the right code in all protocols, for calls and for streams,
// and RetryInfo where a wait helps.
func TestEveryAnswerHasItsCode(t *testing.T) {
	for name, options := range protocols {
		for verb, call := range map[string]func(*httptest.Server, string, string, ...connect.ClientOption) error{"a call": place, "a stream": watch} {
			up, down := serve(t, memstore.New(nil)), serve(t, broken{})
			for range 3 {
				if err := call(up, "acme", "", options...); err != nil {
					t.Fatalf("%s of %s: %v", verb, name, err)
				}
			}
			for _, test := range []struct {
				status           int
				customer, orders string
				server           *httptest.Server
				code             connect.Code
				least, most      time.Duration // of RetryInfo
			}{
				{429, "acme", "", up, connect.CodeResourceExhausted, time.Second, time.Minute},
				{422, "acme", "4", up, connect.CodeInvalidArgument, -1, -1},
				{400, "", "", up, connect.CodeInvalidArgument, -1, -1},
				{400, "acme", "-1", up, connect.CodeInvalidArgument, -1, -1},
				{503, "acme", "", down, connect.CodeUnavailable, 5 * time.Second, 10 * time.Second},
			} {
				err := call(test.server, test.customer, test.orders, options...)
				if got := connect.CodeOf(err); got != test.code {
					t.Errorf("%d, %s of %s: got %v, %v, want %v", test.status, verb, name, got, err, test.code)
				}
				if got := retryInfo(err); got < test.least || got > test.most {
					t.Errorf("%d, %s of %s: RetryInfo is %v, want %v to %v", test.status, verb, name, got, test.least, test.most)
				}
			}
		}
	}
}

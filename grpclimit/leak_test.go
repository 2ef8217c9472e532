package grpclimit_test

import (
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/grpclimit"
	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/memstore"
)

func TestNoTypeShowsKeys(t *testing.T) {
	store := memstore.New(nil)
	config := grpclimit.Config{
		Policies: []grpclimit.Policy{{Limit: perMinute, Key: byUser}},
		InFlight: []grpclimit.InFlightPolicy{{Limit: ratelimit.InFlight{Name: "calls", Limit: 1, Lease: time.Minute}, Key: byUser}},
		Permits:  store.Permits(),
	}
	limit := newLimiter(t, store, config)
	call := grpclimit.Call{Method: sayMethod, Context: metadata.NewIncomingContext(t.Context(), metadata.Pairs("x-user", leak.Key)), Message: leak.Key}
	clientConfig := grpclimit.ClientConfig{Scope: func(string, string) string { return leak.Key }}
	client, err := grpclimit.NewClient(&clientConfig)
	must(t, err)
	addresses, err := grpclimit.NewAddresses(nil)
	must(t, err)
	leak.Check(t, ".", map[string]any{
		"ClientStore":    memstore.New(nil),
		"Store":          memstore.New(nil),
		"AddressConfig":  grpclimit.AddressConfig{},
		"Addresses":      addresses,
		"Call":           []any{call, &call},
		"Client":         client,
		"ClientConfig":   clientConfig,
		"Config":         []any{config, &config},
		"InFlightPolicy": config.InFlight[0],
		"Limiter":        limit,
		"Outcome":        grpclimit.Outcome{Call: &call, Code: codes.OK},
		"Policy":         config.Policies[0],
		"WaitError":      &grpclimit.WaitError{Until: time.Now(), Err: errors.New("down")},
	})
	refused := (ratelimit.Result{Status: ratelimit.Status{Request: perMinute.For(leak.Key)}}).Err()
	leak.Errors(t, ".", map[string]leak.Provoked{"WaitError": {Err: &grpclimit.WaitError{Until: time.Now(), Err: refused}}})
}

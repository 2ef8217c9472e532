package grpclimit_test

import (
	"bytes"
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/fallback"
	"github.com/pgratelimit/ratelimit/grpclimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// A database that is known to be silent is answered Unavailable with RetryInfo at once, told of by a
// class of its own, and not logged for each call.
func TestSilentDatabase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		db := memstore.New(nil)
		store, err := fallback.New(db, &fallback.Config{Logger: discardLogs})
		if err != nil {
			t.Fatal(err)
		}
		defer store.Close()
		var heard ratelimit.Event
		limit := newLimiter(t, store, grpclimit.Config{
			Policies: []grpclimit.Policy{{Limit: perMinute}}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
			Observe: func(_ context.Context, e ratelimit.Event) { heard = e },
		})
		call := func() error {
			_, err := limit.Unary(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: sayMethod}, func(context.Context, any) (any, error) {
				t.Error("the call was handled")
				return nil, nil
			})
			return err
		}
		db.SetSilent(true)
		for !store.Stats().Silent {
			_ = call()
			time.Sleep(time.Second)
		}
		log.Reset()
		began, err := time.Now(), call()
		if _, again := told(err); status.Code(err) != codes.Unavailable || again < 5*time.Second || again > 10*time.Second || time.Since(began) > 0 {
			t.Errorf("got %v, again in %v, after %v, want Unavailable at once, and 5 to 10 s", err, again, time.Since(began))
		}
		if heard.Outcome != ratelimit.OutcomeFailed || heard.ErrorClass != "silent" || log.Len() > 0 {
			t.Errorf("told as %v of class %q, and logged:\n%s", heard, heard.ErrorClass, log.String())
		}
	})
}

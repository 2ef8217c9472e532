package grpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/grpclimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// gated is a service whose calls wait until they are let go.
func gated() (e *echo, began chan context.Context, end chan func()) {
	began, end = make(chan context.Context, 10), make(chan func())
	wait := func(ctx context.Context) {
		began <- ctx
		if do := <-end; do != nil {
			do()
		}
	}
	return &echo{
		say:   func(ctx context.Context, _ string) error { wait(ctx); return nil },
		count: func(stream grpc.ServerStream) error { wait(stream.Context()); return nil },
	}, began, end
}

func TestInFlight(t *testing.T) {
	inEach(t, func(t *testing.T, store fullStore) {
		e, began, end := gated()
		conn := dial(t, e, newLimiter(t, store, grpclimit.Config{
			Policies: []grpclimit.Policy{{Limit: perMinute, Key: byUser}},
			InFlight: []grpclimit.InFlightPolicy{{Limit: calls, Key: byUser}},
			Permits:  store.Permits,
		}))
		done := make(chan error, 2)
		go func() { done <- say(as(t, "ann"), conn, "hello") }()
		<-began
		go func() { _, err := count(as(t, "ann"), conn, "hello"); done <- err }()
		<-began
		wantHeld(t, store.Permits, "ann", 2)
		err := say(as(t, "ann"), conn, "hello")
		wantCode(t, err, codes.ResourceExhausted)
		if violated, again := told(err); fmt.Sprint(violated) != "[calls]" || again < time.Second || again > 2*time.Second {
			t.Errorf("refused by %v for %v, want calls for 1 to 2 s", violated, again)
		}
		wantLeft(t, store, perMinute.For("ann"), 1)
		end <- func() { panic("of the handler") }
		end <- nil
		<-done
		<-done
		wantHeld(t, store.Permits, "ann", 0)
		go func() { <-began; end <- nil }()
		wantCode(t, say(as(t, "ann"), conn, "hello"), codes.OK)
		err = say(as(t, "ann"), conn, "hello")
		if violated, _ := told(err); fmt.Sprint(violated) != "[per_minute]" {
			t.Errorf("refused by %v, %v, want per_minute", violated, err)
		}
		wantHeld(t, store.Permits, "ann", 0)
	})
}

// A stream holds as many permits as it weighs until its handler returns, also when the client has gone.
func TestInFlightStream(t *testing.T) {
	inEach(t, func(t *testing.T, store fullStore) {
		e, began, end := gated()
		weight := func(*grpclimit.Call) (int, error) { return 2, nil }
		conn := dial(t, e, newLimiter(t, store, grpclimit.Config{InFlight: []grpclimit.InFlightPolicy{{Limit: calls, Key: byUser, Weight: weight}}, Permits: store.Permits}))
		ctx, leave := context.WithCancel(as(t, "ann"))
		done := make(chan error, 1)
		go func() { _, err := count(ctx, conn, "hello"); done <- err }()
		served := <-began
		leave()
		wantCode(t, <-done, codes.Canceled)
		<-served.Done()
		wantHeld(t, store.Permits, "ann", 2)
		end <- nil
		wantHeld(t, store.Permits, "ann", 0)
	})
}

// The messages of a stream pass as without the limiter.
func TestStreams(t *testing.T) {
	conn := dial(t, &echo{}, newLimiter(t, memstore.New(nil), grpclimit.Config{Policies: []grpclimit.Policy{{Limit: perMinute}}}))
	stream, err := conn.NewStream(t.Context(), &chatDesc, chatMethod)
	must(t, err)
	for n := range 5 {
		in, out := wrapperspb.String(fmt.Sprint(n)), new(wrapperspb.StringValue)
		if err := errors.Join(stream.SendMsg(in), stream.RecvMsg(out)); err != nil || out.GetValue() != in.GetValue() {
			t.Errorf("got %q, %v, want %q", out.GetValue(), err, in.GetValue())
		}
	}
	if err := errors.Join(stream.CloseSend(), stream.RecvMsg(new(wrapperspb.StringValue))); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
}

// A handler takes in its own transaction: a refusal is answered as any other, what rolls back
// costs nothing, and permits are held as ever.
func TestInTx(t *testing.T) {
	store, db := newStore(t)
	must(t, errOf(db.Pool.Exec(t.Context(), "CREATE TABLE "+db.Schema+".orders (text text)")))
	errNoSuchPiece := errors.New("no such piece")
	e := &echo{say: func(ctx context.Context, text string) error {
		if _, ok := grpclimit.PermitOf(ctx, "calls"); !ok {
			t.Error("there is no permit")
		}
		return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "INSERT INTO "+db.Schema+".orders VALUES ($1)", text); err != nil {
				return err
			}
			if err := store.TakeTx(ctx, tx, grpclimit.Requests(ctx)...); err != nil {
				return err
			}
			if text == "fails" {
				return errNoSuchPiece
			}
			return nil
		})
	}}
	var heard []ratelimit.Outcome
	conn := dial(t, e, newLimiter(t, store, grpclimit.Config{
		Policies: []grpclimit.Policy{{Limit: perHour, Key: byUser, Cost: func(c *grpclimit.Call) (float64, error) {
			if m, ok := c.Message.(*wrapperspb.StringValue); ok && m.GetValue() == "much" {
				return 5, nil
			}
			return 2, nil
		}}},
		InFlight: []grpclimit.InFlightPolicy{{Limit: calls, Key: byUser}},
		Permits:  store.Permits(),
		InTx:     func(c *grpclimit.Call) bool { return c.Method == sayMethod },
		Observe:  func(_ context.Context, e ratelimit.Event) { heard = append(heard, e.Outcome) },
	}))
	for _, step := range []struct {
		text         string
		code         codes.Code
		left, orders int64
	}{
		{"one", codes.OK, 2, 1},
		{"fails", codes.Unknown, 2, 1},
		{"much", codes.InvalidArgument, 2, 1},
		{"two", codes.OK, 0, 2},
		{"three", codes.ResourceExhausted, 0, 2},
	} {
		err := say(as(t, "ann"), conn, step.text)
		wantCode(t, err, step.code)
		if violated, again := told(err); step.code == codes.ResourceExhausted && (fmt.Sprint(violated) != "[per_hour]" || again <= 0) {
			t.Errorf("%s: refused by %v for %v", step.text, violated, again)
		}
		var orders int64
		if err := db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+db.Schema+".orders").Scan(&orders); err != nil || orders != step.orders {
			t.Errorf("%s: %d orders, %v, want %d", step.text, orders, err, step.orders)
		}
		wantLeft(t, store, perHour.For("ann"), step.left)
	}
	wantCode(t, say(t.Context(), conn, "no user"), codes.InvalidArgument)
	if got := fmt.Sprint(heard); got != "[granted granted granted granted too_large granted granted granted refused invalid]" {
		t.Errorf("heard %s", got)
	}
	wantHeld(t, store.Permits(), "ann", 0)
}

package grpclimit_test

import (
	"context"
	"errors"
	"io"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/grpclimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// refusing refuses as often as it says, with RetryInfo or without.
func refusing(times int64, code codes.Code, waits ...time.Duration) *echo {
	var n atomic.Int64
	refuse := func() error {
		if n.Add(1) > times {
			return nil
		}
		s := status.New(code, "later")
		for _, wait := range waits {
			s, _ = s.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(wait)})
		}
		return s.Err()
	}
	return &echo{
		say: func(context.Context, string) error { return refuse() },
		count: func(stream grpc.ServerStream) error {
			if err := refuse(); err != nil {
				return err
			}
			return echoAll(stream)
		},
	}
}

// open is a limiter that grants all.
func open(t *testing.T) *grpclimit.Limiter {
	return newLimiter(t, memstore.New(nil), grpclimit.Config{Policies: []grpclimit.Policy{{Limit: ratelimit.TokenBucket{Name: "open", Rate: 1e6, Period: time.Second}}}})
}

func TestClientHeeds(t *testing.T) {
	t.Parallel()
	const short = 30 * time.Millisecond
	for _, test := range []struct {
		name   string
		server func() *echo
		config grpclimit.ClientConfig
		code   codes.Code
		calls  int64
	}{
		{"refused once", func() *echo { return refusing(1, codes.ResourceExhausted, short) }, grpclimit.ClientConfig{}, codes.OK, 2},
		{"unavailable once", func() *echo { return refusing(1, codes.Unavailable, short) }, grpclimit.ClientConfig{}, codes.OK, 2},
		{"refused often", func() *echo { return refusing(9, codes.ResourceExhausted, short) }, grpclimit.ClientConfig{}, codes.ResourceExhausted, 4},
		{"for too long", func() *echo { return refusing(9, codes.ResourceExhausted, time.Hour) }, grpclimit.ClientConfig{MaxWait: time.Second}, codes.ResourceExhausted, 1},
		{"for too long, by one of two", func() *echo { return refusing(9, codes.ResourceExhausted, time.Hour, short) }, grpclimit.ClientConfig{MaxWait: time.Second}, codes.ResourceExhausted, 1},
		{"without an end", func() *echo { return refusing(1, codes.ResourceExhausted, math.MaxInt64) }, grpclimit.ClientConfig{MaxPause: short}, codes.OK, 2},
		{"for less than nothing", func() *echo { return refusing(1, codes.ResourceExhausted, -time.Hour) }, grpclimit.ClientConfig{}, codes.OK, 2},
		{"at once", func() *echo { return refusing(1, codes.ResourceExhausted, 0) }, grpclimit.ClientConfig{}, codes.OK, 2},
		{"without RetryInfo", func() *echo { return refusing(1, codes.ResourceExhausted) }, grpclimit.ClientConfig{}, codes.ResourceExhausted, 1},
		{"another fault", func() *echo { return refusing(1, codes.Internal, short) }, grpclimit.ClientConfig{}, codes.Internal, 1},
	} {
		for _, streams := range []bool{false, true} {
			t.Run(test.name, func(t *testing.T) {
				t.Parallel()
				server := test.server()
				conn := dial(t, server, open(t), waiting(t, test.config)...)
				err := error(nil)
				if streams {
					var n int
					if n, err = count(t.Context(), conn, "hello"); err == nil && n != 1 {
						t.Errorf("got %d messages, want 1", n)
					}
				} else {
					err = say(t.Context(), conn, "hello")
				}
				wantCode(t, err, test.code)
				if got := server.calls.Load(); got != test.calls {
					t.Errorf("streams %v: %d calls came, want %d", streams, got, test.calls)
				}
			})
		}
	}
}

// A refusal holds back the other calls of the connection, and pauses the limit that clients share; a
// call that would have to wait for too long is not sent.
func TestClientHoldsBack(t *testing.T) {
	server, store := refusing(1, codes.ResourceExhausted, time.Hour), memstore.New(nil)
	conn := dial(t, server, open(t), waiting(t, grpclimit.ClientConfig{
		MaxWait: time.Second, MaxPause: 2 * time.Hour,
		Store: store, Limit: func(context.Context, string, any) ratelimit.Request { return perMinute.For("") },
	})...)
	wantCode(t, say(t.Context(), conn, "hello"), codes.ResourceExhausted)
	err := say(t.Context(), conn, "hello")
	var wait *grpclimit.WaitError
	if !errors.As(err, &wait) || time.Until(wait.Until) < 50*time.Minute {
		t.Errorf("got %v, want a WaitError of an hour", err)
	}
	wantCode(t, err, codes.ResourceExhausted)
	if _, again := told(err); again < 50*time.Minute {
		t.Errorf("its RetryInfo is %v", again)
	}
	_, err = conn.NewStream(t.Context(), &countDesc, countMethod)
	if !errors.As(err, &wait) {
		t.Errorf("a stream: got %v, want a WaitError", err)
	}
	if got := server.calls.Load(); got != 1 {
		t.Errorf("%d calls came, want 1", got)
	}
	if result, err := store.Check(t.Context(), perMinute.For("")); err != nil || time.Until(result.PausedUntil) < 50*time.Minute {
		t.Errorf("the limit is paused until %v, %v, want an hour", result.PausedUntil, err)
	}
}

func TestClientCancelled(t *testing.T) {
	server := refusing(9, codes.ResourceExhausted, 20*time.Second)
	conn := dial(t, server, open(t), waiting(t, grpclimit.ClientConfig{})...)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() { wantCode(t, say(ctx, conn, "hello"), codes.Canceled) })
	}
	for server.calls.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	begun := time.Now()
	cancel()
	wg.Wait()
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("it took %v to give up", took)
	}
	short, stop := context.WithTimeout(t.Context(), time.Second)
	defer stop()
	wantCode(t, say(short, conn, "hello"), codes.ResourceExhausted) // not sent: it would have to wait for longer
}

// A stream in which the client sends several messages is not opened again, but heeded.
func TestClientChats(t *testing.T) {
	server := refusing(1, codes.ResourceExhausted, 50*time.Millisecond)
	conn := dial(t, server, open(t), waiting(t, grpclimit.ClientConfig{})...)
	chat := func() error {
		stream, err := conn.NewStream(t.Context(), &chatDesc, chatMethod)
		if err != nil {
			return err
		}
		for range 3 {
			if err := stream.SendMsg(wrapperspb.String("hello")); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			if err := stream.RecvMsg(new(wrapperspb.StringValue)); err != nil {
				return err
			}
		}
		if err := stream.CloseSend(); err != nil {
			return err
		}
		if err := stream.RecvMsg(new(wrapperspb.StringValue)); !errors.Is(err, io.EOF) {
			return errors.Join(errors.New("no end"), err)
		}
		return nil
	}
	begun := time.Now()
	wantCode(t, chat(), codes.ResourceExhausted)
	if err := chat(); err != nil || time.Since(begun) < 50*time.Millisecond {
		t.Errorf("got %v after %v, want it opened after the hold", err, time.Since(begun))
	}
}

func TestClientNotMade(t *testing.T) {
	for _, client := range []*grpclimit.Client{nil, {}} {
		if err := client.Unary(t.Context(), sayMethod, nil, nil, nil, nil); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("a call: %v, want ErrInvalid", err)
		}
		if _, err := client.Stream(t.Context(), &grpc.StreamDesc{}, nil, sayMethod, nil); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("a stream: %v, want ErrInvalid", err)
		}
	}
}

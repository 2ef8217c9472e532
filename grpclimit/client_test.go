package grpclimit_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/grpclimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
)

// 1,000 clients that wait get through, and in time, over connections of the loopback. They are told
// when the next token is there, not when theirs is, so that a fast one tries hundreds of times.
func TestAllWhoWaitGetThrough(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	inEach(t, func(t *testing.T, store fullStore) {
		t.Parallel()
		const clients = 1000
		rate := ratelimit.TokenBucket{Name: "rate", Rate: 500, Period: time.Second, Capacity: 500}
		e := &echo{}
		limit := newLimiter(t, store, grpclimit.Config{Policies: []grpclimit.Policy{{Limit: rate}}, Jitter: 0.5})
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer(grpc.ChainUnaryInterceptor(limit.Unary), grpc.ChainStreamInterceptor(limit.Stream))
		server.RegisterService(e.desc(), e)
		go server.Serve(listener)
		defer server.Stop()
		conn := connect(t, listener.Addr().String(), waiting(t, grpclimit.ClientConfig{MaxWait: time.Minute, MaxTries: 10_000})...)
		begun := time.Now()
		var wg sync.WaitGroup
		for n := range clients {
			wg.Go(func() {
				var err error
				if n%2 == 0 {
					err = say(t.Context(), conn, "hello")
				} else {
					_, err = count(t.Context(), conn, "hello")
				}
				if err != nil {
					t.Errorf("client %d: %v", n, err)
				}
			})
		}
		wg.Wait()
		took := time.Since(begun)
		if got := e.calls.Load(); got != clients || took < 900*time.Millisecond || took > time.Minute {
			t.Errorf("%d calls were handled in %v, want %d in no less than 1 s", got, took, clients)
		}
		t.Logf("%d of %d in %v", e.calls.Load(), clients, took)
	})
}

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
			for {
				var in wrapperspb.StringValue
				if err := stream.RecvMsg(&in); err != nil {
					if errors.Is(err, io.EOF) {
						return nil
					}
					return err
				}
				if err := stream.SendMsg(&in); err != nil {
					return err
				}
			}
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
		{"no tries", func() *echo { return refusing(9, codes.ResourceExhausted, short) }, grpclimit.ClientConfig{MaxTries: 1}, codes.ResourceExhausted, 1},
		{"for too long", func() *echo { return refusing(9, codes.ResourceExhausted, time.Hour) }, grpclimit.ClientConfig{MaxWait: time.Second}, codes.ResourceExhausted, 1},
		{"for too long, by one of two", func() *echo { return refusing(9, codes.ResourceExhausted, time.Hour, short) }, grpclimit.ClientConfig{MaxWait: time.Second}, codes.ResourceExhausted, 1},
		{"for longer than is believed", func() *echo { return refusing(1, codes.ResourceExhausted, time.Hour) }, grpclimit.ClientConfig{MaxPause: short}, codes.OK, 2},
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

// A refusal holds back the other calls of the connection, and a call that would have to wait
// for too long is not sent.
func TestClientHoldsBack(t *testing.T) {
	server := refusing(1, codes.ResourceExhausted, time.Hour)
	conn := dial(t, server, open(t), waiting(t, grpclimit.ClientConfig{MaxWait: time.Second, MaxPause: 2 * time.Hour})...)
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
}

// refusedStream is a stream that the server refuses when the client waits for its answer.
type refusedStream struct {
	grpc.ClientStream
	refuse func() error
}

func (s refusedStream) SendMsg(any) error { return nil }
func (s refusedStream) CloseSend() error  { return nil }
func (s refusedStream) RecvMsg(any) error { return s.refuse() }

// A server that refuses everything, whatever its RetryInfo says, gets the calls that are under way
// when it begins, and then a few: 100 goroutines that never give up send less than 110 in 2 s. No
// RetryInfo holds calls back, or pauses the limit of all processes, for longer than MaxPause.
func TestClientAgainstHostileServers(t *testing.T) {
	conn, err := grpc.NewClient("passthrough:///nowhere", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	quota := ratelimit.TokenBucket{Name: "partner", Rate: 1e6, Period: time.Second}
	for _, test := range []struct {
		code codes.Code
		info *errdetails.RetryInfo
	}{
		{codes.ResourceExhausted, &errdetails.RetryInfo{}},
		{codes.ResourceExhausted, &errdetails.RetryInfo{RetryDelay: durationpb.New(0)}},
		{codes.ResourceExhausted, &errdetails.RetryInfo{RetryDelay: durationpb.New(1)}},
		{codes.ResourceExhausted, &errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)}},
		{codes.ResourceExhausted, &errdetails.RetryInfo{RetryDelay: durationpb.New(-time.Hour)}},
		{codes.ResourceExhausted, &errdetails.RetryInfo{RetryDelay: &durationpb.Duration{Seconds: math.MaxInt64, Nanos: -1}}},
		{codes.ResourceExhausted, &errdetails.RetryInfo{RetryDelay: &durationpb.Duration{Seconds: math.MinInt64, Nanos: math.MaxInt32}}},
		{codes.ResourceExhausted, &errdetails.RetryInfo{RetryDelay: durationpb.New(1000 * time.Hour)}},
		{codes.Unavailable, &errdetails.RetryInfo{}},
	} {
		for _, streams := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				var sent atomic.Int64
				refusal, err := status.New(test.code, "later").WithDetails(test.info)
				if err != nil {
					t.Fatal(err)
				}
				refuse := func() error {
					sent.Add(1)
					time.Sleep(5 * time.Millisecond) // so that all are under way
					return refusal.Err()
				}
				store := memstore.New(nil)
				var log bytes.Buffer
				client, err := grpclimit.NewClient(&grpclimit.ClientConfig{
					Store: store, Limit: func(context.Context, string, any) ratelimit.Request { return quota.For("") },
					Logger: slog.New(slog.NewTextHandler(&log, nil)),
				})
				if err != nil {
					t.Fatal(err)
				}
				call := func() error {
					if !streams {
						return client.Unary(t.Context(), sayMethod, nil, nil, conn, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return refuse() })
					}
					stream, err := client.Stream(t.Context(), &countDesc, conn, countMethod, func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
						return refusedStream{refuse: refuse}, nil
					})
					if err != nil {
						return err
					}
					return stream.RecvMsg(nil)
				}
				begin := time.Now()
				var wg sync.WaitGroup
				for range 100 {
					wg.Go(func() {
						for time.Since(begin) < 2*time.Second {
							if err := call(); err == nil {
								t.Error("a call was granted")
							}
							time.Sleep(time.Millisecond) // and the caller comes again
						}
					})
				}
				time.Sleep(2 * time.Second)
				if n := sent.Load(); n < 100 || n >= 110 {
					t.Errorf("%v, %v, streams %v: %d calls in 2 s, want 100 to 109", test.code, test.info, streams, n)
				}
				wg.Wait()
				result, err := store.Check(t.Context(), quota.For(""))
				if err != nil || time.Until(result.PausedUntil) > 5*time.Minute || log.Len() > 0 {
					t.Errorf("%v, %v: the shared limit is paused until %v, %v; logged:\n%.300s", test.code, test.info, result.PausedUntil, err, log.String())
				}
			})
		}
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

// Clients of several processes share a quota through a store, and a refusal pauses all.
func TestClientsShareALimit(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	inEach(t, func(t *testing.T, store fullStore) {
		t.Parallel()
		quota := ratelimit.TokenBucket{Name: "partner", Rate: 20, Period: time.Second, Capacity: 1}
		server := refusing(1, codes.ResourceExhausted, 500*time.Millisecond)
		config := grpclimit.ClientConfig{
			Store: store, MaxTries: 10,
			Limit: func(context.Context, string, any) ratelimit.Request { return quota.For("") },
		}
		begun := time.Now()
		var wg sync.WaitGroup
		for range 2 {
			conn := dial(t, server, open(t), waiting(t, config)...)
			for range 5 {
				wg.Go(func() { wantCode(t, say(t.Context(), conn, "hello"), codes.OK) })
			}
		}
		wg.Wait()
		// 11 calls, of which one at once, and a pause of at least most of 500 ms.
		if took := time.Since(begun); server.calls.Load() != 11 || took < 700*time.Millisecond {
			t.Errorf("%d calls came in %v, want 11 in no less than 700 ms", server.calls.Load(), took)
		}
	})
}

// A store that fails keeps calls from being sent.
func TestClientStoreFails(t *testing.T) {
	server := &echo{}
	conn := dial(t, server, open(t), waiting(t, grpclimit.ClientConfig{
		Store: failing{memstore.New(nil)},
		Limit: func(context.Context, string, any) ratelimit.Request { return perMinute.For("") },
	})...)
	if err := say(t.Context(), conn, "hello"); !errors.Is(err, errDatabase) {
		t.Errorf("got %v, want the store's error", err)
	}
	if server.calls.Load() != 0 {
		t.Error("the call was sent")
	}
}

func TestNewClientFindsFaults(t *testing.T) {
	for name, config := range map[string]grpclimit.ClientConfig{
		"MaxWait":  {MaxWait: -1},
		"MaxTries": {MaxTries: -1},
		"MaxPause": {MaxPause: -1},
		"Store":    {Store: memstore.New(nil)},
	} {
		if _, err := grpclimit.NewClient(&config); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), "grpclimit: "+name) {
			t.Errorf("got %v, want ErrInvalid with %q", err, name)
		}
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

package grpclimit_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/grpclimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(8) // those that take time wait for instants
	pgtest.Main(m)
}

var (
	perMinute = ratelimit.TokenBucket{Name: "per_minute", Rate: 10, Period: time.Minute, Capacity: 3}
	perHour   = ratelimit.FixedWindow{Name: "per_hour", Rate: 4, Period: time.Hour}
	calls     = ratelimit.InFlight{Name: "calls", Limit: 2, Lease: time.Minute}

	byUser      = grpclimit.ByMetadata("x-user")
	discardLogs = slog.New(slog.NewTextHandler(io.Discard, nil))
)

func newStore(t testing.TB) (*pgstore.Store, *pgtest.DB) {
	t.Helper()
	db := pgtest.New(t)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	must(t, err)
	return store, db
}

// fullStore is a store of both sorts of limits.
type fullStore struct {
	ratelimit.Store
	Permits ratelimit.Permits
}

// inEach runs a test with memory and with PostgreSQL.
func inEach(t *testing.T, test func(t *testing.T, store fullStore)) {
	t.Run("memory", func(t *testing.T) {
		store := memstore.New(nil)
		test(t, fullStore{store, store.Permits()})
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		store, _ := newStore(t)
		test(t, fullStore{store, store.Permits()})
	})
}

func newLimiter(t testing.TB, store grpclimit.Store, config grpclimit.Config) *grpclimit.Limiter {
	t.Helper()
	if config.Logger == nil {
		config.Logger = discardLogs
	}
	if config.Timeout == 0 {
		config.Timeout = 20 * time.Second
	}
	l, err := grpclimit.New(store, &config)
	must(t, err)
	return l
}

// echo is a service with a unary method and streams of two sorts. Nil functions answer at once.
type echo struct {
	say   func(ctx context.Context, text string) error
	count func(stream grpc.ServerStream) error
	calls atomic.Int64
}

const (
	sayMethod   = "/test.Echo/Say"
	countMethod = "/test.Echo/Count"
	chatMethod  = "/test.Echo/Chat"
)

var (
	countDesc = grpc.StreamDesc{StreamName: "Count", ServerStreams: true}
	chatDesc  = grpc.StreamDesc{StreamName: "Chat", ServerStreams: true, ClientStreams: true}
)

func (e *echo) unary(ctx context.Context, in *wrapperspb.StringValue) (*wrapperspb.StringValue, error) {
	e.calls.Add(1)
	if e.say != nil {
		if err := e.say(ctx, in.GetValue()); err != nil {
			return nil, err
		}
	}
	return in, nil
}

// stream answers each message that it gets, if there is no other function.
func (e *echo) stream(stream grpc.ServerStream) error {
	e.calls.Add(1)
	if e.count != nil {
		return e.count(stream)
	}
	return echoAll(stream)
}

func echoAll(stream grpc.ServerStream) error {
	for {
		var in wrapperspb.StringValue
		if err := stream.RecvMsg(&in); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := stream.SendMsg(&in); err != nil {
			return err
		}
	}
}

func (e *echo) desc() *grpc.ServiceDesc {
	stream := func(srv any, s grpc.ServerStream) error { return srv.(*echo).stream(s) }
	count, chat := countDesc, chatDesc
	count.Handler, chat.Handler = stream, stream
	return &grpc.ServiceDesc{
		ServiceName: "test.Echo",
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{
			MethodName: "Say",
			Handler: func(srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
				in := new(wrapperspb.StringValue)
				if err := decode(in); err != nil {
					return nil, err
				}
				handler := func(ctx context.Context, in any) (any, error) {
					return srv.(*echo).unary(ctx, in.(*wrapperspb.StringValue))
				}
				return interceptor(ctx, in, &grpc.UnaryServerInfo{Server: srv, FullMethod: sayMethod}, handler)
			},
		}},
		Streams: []grpc.StreamDesc{count, chat},
	}
}

// recovering answers a panic, as servers' interceptors do.
func recovering(ctx context.Context, in any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (out any, err error) {
	defer func() {
		if recover() != nil {
			err = status.Error(codes.Internal, "panicked")
		}
	}()
	return handler(ctx, in)
}

func recoveringStream(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer func() {
		if recover() != nil {
			err = status.Error(codes.Internal, "panicked")
		}
	}()
	return handler(srv, stream)
}

// dial serves e behind limit, and returns a connection to it.
func dial(t testing.TB, e *echo, limit *grpclimit.Limiter, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(recovering, limit.Unary), grpc.ChainStreamInterceptor(recoveringStream, limit.Stream))
	server.RegisterService(e.desc(), e)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return connect(t, "passthrough:///echo", append(opts, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return listener.DialContext(ctx)
	}))...)
}

func connect(t testing.TB, target string, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(target, append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// waiting has a connection keep to what servers say.
func waiting(t testing.TB, config grpclimit.ClientConfig) []grpc.DialOption {
	t.Helper()
	client, err := grpclimit.NewClient(&config)
	must(t, err)
	return []grpc.DialOption{grpc.WithChainUnaryInterceptor(client.Unary), grpc.WithChainStreamInterceptor(client.Stream)}
}

// as is a context with metadata.
func as(t testing.TB, user string) context.Context {
	return metadata.AppendToOutgoingContext(t.Context(), "x-user", user)
}

func say(ctx context.Context, conn *grpc.ClientConn, text string, opts ...grpc.CallOption) error {
	return conn.Invoke(ctx, sayMethod, wrapperspb.String(text), new(wrapperspb.StringValue), opts...)
}

// count opens a stream as generated code does, and reads it to its end.
func count(ctx context.Context, conn *grpc.ClientConn, text string) (messages int, err error) {
	stream, err := conn.NewStream(ctx, &countDesc, countMethod)
	if err == nil {
		err = stream.SendMsg(wrapperspb.String(text))
	}
	if err == nil {
		err = stream.CloseSend()
	}
	for ; err == nil; messages++ {
		err = stream.RecvMsg(new(wrapperspb.StringValue))
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return messages - 1, err
}

func wantCode(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

// told is what a status says of limits: who refused, and when to try again, or −1.
func told(err error) (violated []string, again time.Duration) {
	again = -1
	for _, d := range status.Convert(err).Details() {
		switch d := d.(type) {
		case *errdetails.RetryInfo:
			again = d.GetRetryDelay().AsDuration()
		case *errdetails.QuotaFailure:
			for _, v := range d.GetViolations() {
				violated = append(violated, v.GetSubject())
			}
		}
	}
	return violated, again
}

// checker is a store that can be asked what is left.
type checker interface {
	Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error)
}

func wantLeft(t *testing.T, store checker, request ratelimit.Request, want int64) {
	t.Helper()
	if result, err := store.Check(t.Context(), request); err != nil || result.Remaining != want {
		t.Errorf("%d of %v are left, %v, want %d", result.Remaining, request, err, want)
	}
}

// wantHeld waits until so many permits of a key are held.
func wantHeld(t *testing.T, store ratelimit.Permits, key string, want int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		permits, err := store.Held(context.WithoutCancel(t.Context()), calls, key)
		must(t, err)
		if len(permits) == want {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d permits are held, want %d", len(permits), want)
		}
	}
}

var errDatabase = errors.New("the database is down")

// failing is a store that answers with an error.
type failing struct{ *memstore.Store }

func (failing) Allow(context.Context, ...ratelimit.Request) (ratelimit.Result, error) {
	return ratelimit.Result{}, errDatabase
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a function that returns a value as well.
func errOf[T any](_ T, err error) error { return err }

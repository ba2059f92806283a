// SPDX-License-Identifier: Apache-2.0

package idm

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/cohdi/cohdi-agent/cmd/cohdi-sim/internal/config"
)

// Why a token is refused.
var (
	ErrNoToken  = errors.New("no bearer token")
	ErrBadToken = errors.New("token expired or revoked")
)

const maxForm = 64 << 10

// Manager makes and checks tokens.
type Manager struct {
	clk   clock.PassiveClock
	realm string
	want  config.Credentials

	mu       sync.Mutex
	key      []byte
	lifetime time.Duration
	logins   int
}

// New needs the realm, the credentials and the lifetime of the configuration.
func New(cfg *config.Config, clk clock.PassiveClock) *Manager {
	return &Manager{
		clk: clk, realm: cfg.Realm, want: cfg.Credentials, lifetime: time.Duration(cfg.TokenLifetime), key: newKey(),
	}
}

func newKey() []byte {
	key := make([]byte, sha256.Size)
	// Read never fails: the runtime ends the process instead.
	_, _ = rand.Read(key)
	return key
}

// Handler is the face.
func (m *Manager) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /id_manager/realms/{realm}/protocol/openid-connect/token", m.token("password"))
	return mux
}

// Keycloak is the face of a Keycloak without anything in front of it, where a service account can log in, too.
func (m *Manager) Keycloak() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /realms/{realm}/protocol/openid-connect/token", m.token("password", "client_credentials"))
	return mux
}

// Logins counts the tokens that were given out.
func (m *Manager) Logins() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.logins
}

// RevokeAll makes all tokens worthless.
func (m *Manager) RevokeAll() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.key = newKey()
}

// SetLifetime is for tokens given out from now on.
func (m *Manager) SetLifetime(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lifetime = d
}

func (m *Manager) token(grants ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { m.login(w, r, grants) }
}

func (m *Manager) login(w http.ResponseWriter, r *http.Request, grants []string) {
	if r.PathValue("realm") != m.realm {
		refuse(w, http.StatusNotFound, "Realm does not exist", "")
		return
	}
	if t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || t != "application/x-www-form-urlencoded" {
		refuse(w, http.StatusUnsupportedMediaType, "invalid_request", "the body must be a form")
		return
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxForm))
	if err != nil {
		return // the client has gone
	}
	status, code, text := check(string(body), m.want, grants)
	if status != http.StatusOK {
		refuse(w, status, code, text)
		return
	}
	reply(w, http.StatusOK, m.issue())
}

// check decides on a login. The form may come from a client that does not encode at all: a literal space is legal.
func check(body string, want config.Credentials, grants []string) (status int, code, text string) {
	form, err := url.ParseQuery(body)
	if err != nil {
		return http.StatusBadRequest, "invalid_request", "the form cannot be read"
	}
	grant := form.Get("grant_type")
	switch {
	case !slices.Contains(grants, grant):
		return http.StatusBadRequest, "unsupported_grant_type", "only " + strings.Join(grants, " and ") + " is"
	case !same(form.Get("client_id"), want.ClientID) || !same(form.Get("client_secret"), want.ClientSecret):
		return http.StatusUnauthorized, "invalid_client", "Invalid client credentials"
	case grant == "password" && (!same(form.Get("username"), want.Username) || !same(form.Get("password"), want.Password)):
		return http.StatusUnauthorized, "invalid_grant", "Invalid user credentials"
	}
	return http.StatusOK, "", ""
}

func same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

type tokenReply struct {
	AccessToken      string `json:"access_token"`
	ExpiresIn        int    `json:"expires_in"`
	RefreshExpiresIn int    `json:"refresh_expires_in"`
	RefreshToken     string `json:"refresh_token"`
	TokenType        string `json:"token_type"`
	IDToken          string `json:"id_token"`
	NotBeforePolicy  int    `json:"not-before-policy"`
	SessionState     string `json:"session_state"`
	Scope            string `json:"scope"`
}

type claims struct {
	Expires  int64  `json:"exp"`
	Issued   int64  `json:"iat"`
	ID       string `json:"jti"`
	Party    string `json:"azp"`
	Username string `json:"preferred_username"`
}

func (m *Manager) issue() tokenReply {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.logins++
	now := m.clk.Now()
	id := fmt.Sprintf("login-%d", m.logins)
	c := claims{now.Add(m.lifetime).Unix(), now.Unix(), id, m.want.ClientID, m.want.Username}
	return tokenReply{
		AccessToken: sign(m.key, c), ExpiresIn: int(m.lifetime.Seconds()), RefreshExpiresIn: 1800, RefreshToken: "refresh-" + id,
		TokenType: "Bearer", IDToken: sign(m.key, c), SessionState: id, Scope: "openid profile",
	}
}

func sign(key []byte, c claims) string {
	payload, err := json.Marshal(c)
	if err != nil {
		panic(err) // strings and numbers only
	}
	enc := base64.RawURLEncoding
	text := enc.EncodeToString([]byte(`{"alg":"HS256","typ":"JWT"}`)) + "." + enc.EncodeToString(payload)
	return text + "." + enc.EncodeToString(mac(key, text))
}

func mac(key []byte, text string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(text))
	return h.Sum(nil)
}

// Check tells whether the request carries a token that is good now.
func (m *Manager) Check(r *http.Request) error {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || token == "" {
		return ErrNoToken
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	c, ok := verify(m.key, token)
	if !ok || m.clk.Now().Unix() >= c.Expires {
		return ErrBadToken
	}
	return nil
}

func verify(key []byte, token string) (claims, bool) {
	var c claims
	at := strings.LastIndexByte(token, '.')
	if at < 0 {
		return c, false
	}
	sum, err := base64.RawURLEncoding.DecodeString(token[at+1:])
	if err != nil || !hmac.Equal(sum, mac(key, token[:at])) {
		return c, false
	}
	_, payload, _ := strings.Cut(token[:at], ".")
	data, err := base64.RawURLEncoding.DecodeString(payload)
	return c, err == nil && json.Unmarshal(data, &c) == nil
}

func refuse(w http.ResponseWriter, status int, code, text string) {
	body := map[string]string{"error": code}
	if text != "" {
		body["error_description"] = text
	}
	reply(w, status, body)
}

func reply(w http.ResponseWriter, status int, body any) {
	data, err := json.Marshal(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(data) //nolint:errcheck // the client has gone
}
